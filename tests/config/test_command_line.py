"""The command line: settings, mistakes, exit statuses, sweeps, help."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.chain.steps import chain_steps, compose
from flows.cli import tool
from flows.cli.composed import Composed
from flows.cli.config import compose_config, read, run_main, vocabulary
from flows.cli.usage import listed_experiments
from flows.cli.vocabulary import CONF, in_step
from tasks.core.errors import ConfigError


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_option_composes() -> None:
    """An option of each group at a time."""
    groups: dict[str, list[str]] = {}
    for file in sorted(CONF.glob("*/*.yaml")):
        if file.parent.name not in ("exp", "hydra"):
            groups.setdefault(file.parent.name, []).append(file.stem)
    for number in range(max(map(len, groups.values()))):
        options = {name: files[min(number, len(files) - 1)] for name, files in groups.items()}
        chosen = [f"{name}={option}" for name, option in options.items()]
        compose_config([*chosen, "model.path=/models/m"])  # smollm2 is not always installed


def test_relative_runs_and_passwords(tmp_path: Path) -> None:
    composed = compose_config(["tracking.uri='https://me:s3cret@host:5000/x'"])
    assert composed.runs == tmp_path / "runs"
    assert composed.tracking_uri == "https://me:s3cret@host:5000/x"
    assert "s3cret" not in composed.text
    assert "https://me:***@host:5000/x" in composed.text


def refused(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        compose_config(list(overrides))
    return caught.value


def test_all_wrong_overrides_are_reported_at_once() -> None:
    error = refused(
        "train.lrr=1", "train.epochs=two", "peft=adalora", "seed=3", "steps.ppo.peft.rnk=4"
    )
    assert [line.rpartition(" -> ")[2] for line in error.details] == [
        "train.lr=1", "peft=lora or peft=qlora", "steps.ppo.peft.rank=4", "train.epochs=<a number>",
    ]  # fmt: skip
    bounds = refused("train.lr=-1", "peft.rank=0", "smoke.min_stop_rate=2", "timeouts.merge_s=nan")
    assert [line.partition(":")[0] for line in bounds.details] == [
        "train.lr", "peft.rank", "smoke.min_stop_rate", "timeouts.merge_s",
    ]  # fmt: skip
    assert refused("zero.offload_param=cpuu").hint == "zero.offload_param=cpu"
    assert refused("train=ppo", "rl=gspo").hint == "train=gspo"


def composed(program: str, words: list[str]) -> Composed:
    if program in tool.TOOLS:
        return tool.read(program, words)
    return compose_config(read(words, vocabulary(program))[1], config_name=program)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("rlhf ppo:train.lr=1e-4", "steps.ppo.train.lr=1e-4"),
        ("rlhf steps.ppo:train.lr=1e-4", "steps.ppo.train.lr=1e-4"),
        ("rlhf steps.ppo.train.lr:1e-4", "steps.ppo.train.lr=1e-4"),
        ("rlhf train:lr=1e-4", "train.lr=1e-4"),
        ("rlhf train.lr:1e-4", "train.lr=1e-4"),
        ("rlhf +exp:qlora", "+exp=qlora"),
        ("rlhf steps.ppo.peft=adalora", "steps.ppo.peft=lora or steps.ppo.peft=qlora"),
        ("deliver . out:x", "out=x"),
        ("prune keep=1 older_than:30", "older_than=30"),
        ("audit . base:x", "base=x"),
        ("verify . url:http://localhost:8000", "url=http://localhost:8000"),
    ],
)
def test_a_setting_that_is_written_wrongly_is_answered(typed: str, hint: str) -> None:
    """A colon for an equals sign was dropped; a hint without its step changes every step."""
    program, *words = typed.split()
    with pytest.raises(ConfigError) as caught:
        composed(program, words)
    details = [detail.partition(" -> ")[2] for detail in caught.value.details]
    assert hint in [caught.value.hint, *details]


def test_wrong_values_of_one_step_are_answered_for_that_step() -> None:
    overrides = ["+exp=qlora", "steps.ppo.train.lr=x", "steps.ppo.peft.rank=x"]
    with pytest.raises(ConfigError) as caught:
        chain_steps(compose(overrides), overrides)
    assert [detail.partition(" -> ")[2].partition("=")[0] for detail in caught.value.details] == [
        "steps.ppo.train.lr", "steps.ppo.peft.rank",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("hint", "own"),
    [
        ("+exp=x or --help", "+exp=x or --help"),
        (
            "train.lr=1 or peft=lora, or mend a=b",
            "steps.a.train.lr=1 or steps.a.peft=lora, or mend a=b",
        ),
    ],
)
def test_hints_reach_a_step_with_settings_alone(hint: str, own: str) -> None:
    """Prose and words of the whole run with the prefix of a step could not be typed."""
    assert in_step("a", hint) == own


class Job:
    """A job that records its arguments; its status is `zero.stage`."""

    def __init__(self) -> None:
        self.seen: list[tuple[Composed, list[str]]] = []

    def __call__(self, composed: Composed, overrides: list[str]) -> int:
        self.seen.append((composed, overrides))
        return int(composed.settings["zero"]["stage"])


def test_a_sweep_runs_every_job_and_returns_the_worst(tmp_path: Path) -> None:
    job = Job()
    assert run_main("rlhf", job, argv=["zero.stage=3,0", "--multirun"]) == 3
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert written == [Path("runs/hydra/multirun.yaml")]
    assert [overrides for _, overrides in job.seen] == [[f"zero.stage={n}"] for n in (3, 0)]


def test_experiments_of_a_config_dir_are_listed_and_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine" / "exp").mkdir(parents=True)
    file = tmp_path / "mine" / "exp" / "first.yaml"
    file.write_text("# @package _global_\n\n# About it.\ntag: mine\n")
    folders = [f"--config-dir={tmp_path / name}" for name in ("mine", "other")]
    (tmp_path / "other").mkdir()
    job = Job()
    assert run_main("rlhf", job, argv=[*folders, "+exp=first"]) == 2
    ((composed, overrides),) = job.seen
    assert composed.settings["tag"] == "mine"
    assert compose_config(overrides).settings["tag"] == "mine"  # as a worker gets it
    assert run_main("rlhf", job, argv=[*folders, "--help"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["+exp=first", "About", "it."] in lines
    for typed in (["fir", *folders], ["fir", "--config-dir", str(tmp_path / "mine")]):
        assert listed_experiments(typed)[1].split() == ["+exp=first", "About", "it."]
