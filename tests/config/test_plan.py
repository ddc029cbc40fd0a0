"""`plan=true`: its text, no files written, and the exit status of the program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flows.chain import stages as chain_stages
from flows.chain.steps import Step
from flows.cli.config import Composed, compose_config
from flows.cli.plan import bar, check, count_rows, forecast, render
from tasks.core.errors import ConfigError, DataError
from tasks.pipeline.artifact import Origin, publish, staging
from tests.training.conftest import make_tokenizer

PROGRAM = Path(__file__).resolve().parents[2] / "flows" / "rlhf.py"
CHAIN = ["prepare_data", "prepare_base", "train", "gather", "merge", "convert", "smoke_eval"]


def composed_in(tmp_path: Path, *overrides: str) -> Composed:
    return compose_config([*overrides, f"paths.runs={tmp_path / 'runs'}"])


def publish_planned(composed: Composed, name: str, kind: str, **notes: Any) -> str:
    """Publish an artifact under the key that the plan names, and return the key."""
    state = dict(forecast(Step("", composed)))[name]
    key = state.removeprefix("to run: ")
    final = composed.runs / "artifacts" / kind / key
    with staging(final) as work:
        (work / "made.txt").write_text(name)
        publish(work, final, Origin(kind, name, key, notes=notes))
    return key


@pytest.mark.parametrize(("experiment", "merged"), [("qlora", True), ("sft_full", False)])
def test_the_plan_names_every_stage_in_order(tmp_path: Path, experiment: str, merged: bool) -> None:
    planned = forecast(Step("", composed_in(tmp_path, f"+exp={experiment}")))
    wanted = [name for name in CHAIN if merged or name != "merge"]
    assert [name for name, _ in planned] == wanted
    assert all(state.startswith("to run") for _, state in planned)


@pytest.mark.parametrize(
    "overrides",
    [
        ("+exp=reward",),
        ("+exp=sft_qlora", "train=pretrain", "data=jsonl", "data.path=x", "data.text_key=text"),
        ("+exp=ppo_full",),
    ],
    ids=["scores", "texts", "prompts"],
)
def test_keys_cover_the_functions_of_every_kind_of_rows(
    tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    """A plan refuses a stage whose key does not cover the module that it runs."""
    planned = forecast(Step("", composed_in(tmp_path, *overrides)))
    assert planned[-1][0] == "smoke_eval"


def test_finished_stages_are_recognised_by_their_keys(tmp_path: Path) -> None:
    composed = composed_in(tmp_path, "+exp=sft_qlora")
    assert dict(forecast(Step("", composed)))["train"] == "to run"  # its inputs have no digests yet
    base = publish_planned(composed, "prepare_base", chain_stages.BASE.kind)
    data = publish_planned(composed, "prepare_data", chain_stages.DATA.kind)
    planned = dict(forecast(Step("", composed)))
    assert planned["prepare_base"] == f"up to date: {base}"
    assert planned["prepare_data"] == f"up to date: {data}"
    assert planned["train"].startswith("to run: ")
    assert planned["gather"] == "to run"
    shards = publish_planned(composed, "train", chain_stages.TRAIN.kind)
    assert dict(forecast(Step("", composed)))["train"] == f"up to date: {shards}"
    forced = composed_in(tmp_path, "+exp=sft_qlora", "force=[train]")
    assert dict(forecast(Step("", forced)))["train"] == f"to run (forced): {shards}"
    other = composed_in(tmp_path, "+exp=sft_qlora", "train.lr=0.5")
    assert dict(forecast(Step("", other)))["train"].startswith("to run: ")
    assert dict(forecast(Step("", other)))["prepare_base"] == f"up to date: {base}"


def test_the_limit_of_cut_rows_applies_to_a_reused_result(tmp_path: Path) -> None:
    """The limit is in no key: a change trains nothing again, and a tighter limit applies."""
    exp = ["+exp=sft_qlora", "train.max_len=99"]
    composed = composed_in(tmp_path, *exp, "data.max_truncated=0.5")
    publish_planned(composed, "prepare_base", chain_stages.BASE.kind)
    publish_planned(composed, "prepare_data", chain_stages.DATA.kind)
    counts = {"read": 10, "truncated": 3, "fits_99": 0, "fits_all": 200}
    key = publish_planned(
        composed, "train", chain_stages.TRAIN.kind, data={"train": counts, "heldout": {}}
    )
    assert dict(forecast(Step("", composed)))["train"] == f"up to date: {key}"
    looser = composed_in(tmp_path, *exp, "data.max_truncated=0.3")
    assert dict(forecast(Step("", looser)))["train"] == f"up to date: {key}"
    tighter = composed_in(tmp_path, *exp, "data.max_truncated=0.29")
    with pytest.raises(DataError, match=r"3 of 10 rows .* more than data\.max_truncated=0\.29"):
        forecast(Step("", tighter))


def test_an_artifact_without_its_manifest_is_made_again(tmp_path: Path) -> None:
    composed = composed_in(tmp_path)
    key = publish_planned(composed, "prepare_base", chain_stages.BASE.kind)
    (composed.runs / "artifacts" / "base" / key / "manifest.json").unlink()
    assert dict(forecast(Step("", composed)))["prepare_base"].startswith("to run: ")


def test_the_plan_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ["train.nproc=2", "train.micro_batch_size=32", "train.global_batch_size=128"]
    composed = composed_in(tmp_path, "+exp=lora_zero3", *sizes)
    text = render([Step("", composed)])
    assert "deepspeed: ZeRO-3, 32 rows x 2 ranks x 2 passes a step (" in text
    assert '"zero_optimization"' not in text
    assert re.search(r"^  \[#*-*\] \d+% of [\d.]+ GiB, the share of a rank$", text, re.M)
    monkeypatch.setenv("PLUMBLINE_LOG_LEVEL", "DEBUG")
    text = render([Step("", composed)])
    start, end = text.index("deepspeed:\n") + len("deepspeed:\n"), text.index("preflight:")
    deepspeed = json.loads(text[start:end])
    assert deepspeed["zero_optimization"]["stage"] == 3
    assert deepspeed["gradient_accumulation_steps"] == 2
    assert "memory a rank: " in text
    assert text.endswith("preflight:\n  nothing to report")
    assert not composed.runs.exists()


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "[--------------------] 0%"), (0.5, "[##########----------] 50%"),
     (3, "[####################] 300%")],
)  # fmt: skip
def test_the_bar_ends_at_100_percent(share: float, text: str) -> None:
    assert bar(share) == text


def test_a_plan_that_is_refused_is_still_shown(tmp_path: Path) -> None:
    composed = composed_in(tmp_path, "zero=zero3", "train.global_batch_size=7", "model=hf")
    text = render([Step("", composed)])
    assert "deepspeed: none: train.global_batch_size=7 is not a multiple of" in text
    assert "error: peft and zero: QLoRA with ZeRO-3" in text
    assert "memory a rank: unknown" in text
    with pytest.raises(ConfigError, match="the preflight found 3 problems; nothing was started"):
        check([Step("", composed)])


def test_the_plan_counts_the_rows_that_are_too_long(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "base")
    data = tmp_path / "chats.jsonl"
    answers = ["a" * 40] * 6 + ["b" * 100] * 2 + ["c" * 300] * 3
    rows = [{"prompt": f"{n}", "response": answer} for n, answer in enumerate(answers)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    composed = composed_in(
        tmp_path, "+exp=sft_full", "model=hf", f"model.path={tmp_path / 'base'}",
        "data=jsonl", f"data.path={data}", "train.max_len=200",
    )  # fmt: skip
    steps = [Step("", composed)]
    counted = count_rows(steps)
    (line,) = (row for row in render(steps, counted).splitlines() if row.startswith("rows:"))
    assert re.match(r"rows: of 11 rows, 3 \(27\.3%\) are longer than train\.max_len=200 and", line)
    with pytest.raises(ConfigError) as refused:
        check(steps, counted=counted, shown=False)
    pattern = r"train\.max_len: of 11 rows, 3 .*-> train\.max_len=3\d\d"
    assert any(re.fullmatch(pattern, line) for line in refused.value.details)
    assert not composed.runs.exists()


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "q" * 300, "response": "a"}, "leaves no room in 200"),
        ({"prompt": "q", "response": "a", "tools": [{"name": "f"}]}, "'tools'"),
    ],
)
def test_rows_that_cannot_be_trained_are_problems_of_the_plan(
    tmp_path: Path, row: dict[str, Any], what: str
) -> None:
    make_tokenizer().save_pretrained(tmp_path / "base")
    data = tmp_path / "chats.jsonl"
    rows = [{**row, "response": f"{row['response']}{number}"} for number in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = program(
        tmp_path, "+exp=sft_full", "model=hf", f"model.path={tmp_path / 'base'}",
        "data=jsonl", f"data.path={data}", "train.max_len=200", "plan=true",
    )  # fmt: skip
    assert done.returncode == 2
    assert any(what in line and "error: data" in line for line in done.stdout.splitlines())


@pytest.mark.parametrize("zeros", ["train.nproc=0", "train.micro_batch_size=0", "train.nodes=-1"])
def test_a_plan_without_ranks_or_samples(tmp_path: Path, zeros: str) -> None:
    composed = composed_in(tmp_path, zeros)
    assert "error: " in render([Step("", composed)])
    with pytest.raises(ConfigError):
        check([Step("", composed)])


def test_warnings_do_not_stop_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check([Step("", composed_in(tmp_path, "merge.base=original"))])
    assert capsys.readouterr().err.startswith("warning: merge.base: original after QLoRA; ")


def program(cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command of a user, in a directory of their own."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT_", "MLFLOW_"))}
    return subprocess.run(
        [sys.executable, str(PROGRAM), *arguments],
        cwd=cwd, env=inherited, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_plan_exits_0_and_leaves_nothing(tmp_path: Path) -> None:
    done = program(tmp_path, "+exp=sft_qlora", "plan=true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"runs: {tmp_path}/runs\nstages:\n  prepare_data  to run: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("plan", ["true", "false"])
def test_preflight_exits_2_and_leaves_nothing(tmp_path: Path, plan: str) -> None:
    done = program(tmp_path, "zero=zero3", "model=hf", f"plan={plan}")
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == "the preflight found 2 problems; nothing was started"
    for once in ("-> zero=zero2 or peft=lora", "-> model.path="):
        assert (done.stdout + done.stderr).count(once) == 1
        assert (once in done.stdout) == (plan == "true")
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (plan == "true")
    assert list(tmp_path.iterdir()) == []


def test_schema_and_unknown_experiment_exit_2(tmp_path: Path) -> None:
    misspelt = program(tmp_path, "train.lrr=1", "plan=true")
    assert misspelt.returncode == 2
    assert "-> train.lr=1\n" in misspelt.stderr
    unknown = program(tmp_path, "+exp=qlorra", "plan=true")
    assert unknown.returncode == 2
    assert "-> +exp=qlora or " in unknown.stderr
    assert "Traceback" not in misspelt.stderr + unknown.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_plans_every_job_and_exits_with_the_worst(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    user = tmp_path / "user"
    user.mkdir()
    sweep = ["--multirun", "zero=zero3,zero2", "plan=true", f"paths.runs={runs}"]
    done = program(user, *sweep)
    assert done.returncode == 2
    assert done.stdout.count("stages:\n") == 2  # the first one's fault did not stop the second
    assert (done.stdout + done.stderr).count("QLoRA with ZeRO-3") == 1
    assert list(user.iterdir()) == []
    written = [path.relative_to(runs) for path in runs.rglob("*") if path.is_file()]
    assert written == [Path("hydra/multirun.yaml")]


def test_cfg_job_prints_the_configuration(tmp_path: Path) -> None:
    mine = ("model.path=owner/name", "data.path=rows.csv")
    done = program(tmp_path, "+exp=lora_zero3", *mine, "--cfg", "job")
    assert done.returncode == 0
    for line in ("gradient_checkpointing: true", "kind: hf", "kind: csv", "max_len: 2048"):
        assert f"  {line}\n" in done.stdout  # computed defaults as well
    assert list(tmp_path.iterdir()) == []
