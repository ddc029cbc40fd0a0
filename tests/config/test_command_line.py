"""The command line: settings, mistakes, exit statuses, sweeps, help."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest

from flows import program
from flows.chain.steps import chain_steps
from flows.cli.arguments import read, repeated, split
from flows.cli.config import CONF, SCHEMAS, Composed, compose_config, vocabulary
from flows.cli.entry import run_main
from flows.cli.peer_names import PEERS, translate
from flows.cli.plan import check
from flows.cli.usage import setting_help
from flows.commands import audit as audit_command
from flows.delivery.run_delivery import plan
from tasks.core.errors import ConfigError
from tasks.core.terminal import typed
from tests.audit.making import make_adapter, make_model


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
    error = refused("learning_rate=1", "train.epochs=two", "peft=adalora", "seed=3")
    assert [line.rpartition(" -> ")[2] for line in error.details] == [
        "train.lr=1", "train.epochs=1.0", "peft=lora or peft=qlora",
    ]  # fmt: skip
    assert refused("train.loss.beta=much", "+exp=dpo").hint == "train.loss.beta=0.1"


def test_faults_of_an_experiment_file_name_its_line(tmp_path: Path) -> None:
    file = tmp_path / "exp" / "mine.yaml"
    file.parent.mkdir()
    for body, key, line in (
        ("zero:\n  stage: two\n", "zero.stage", 3),
        ("trian:\n  lr: 3\n", "trian", 2),
    ):
        file.write_text("# @package _global_\n" + body)
        error = refused(f"hydra.searchpath=[file://{tmp_path}]", "+exp=mine")
        assert error.message.startswith(key)
        assert f"({file}:{line})" in error.message


class Mistake(NamedTuple):
    """A command (arguments separated by `;`) and the part of its answer that suggests a fix."""

    program: str
    typed: str
    answer: str


RUN = "+exp=sft_qlora"
MISTAKES = [
    Mistake("rlhf", f"{RUN};gradient_accumulation_steps=4", "-> train.global_batch_size=<"),
    Mistake("rlhf", "+exp=grpo;rl.samples=8", "-> rl.num_generations=8"),
    Mistake("rlhf", "+exp=sft", "-> +exp=sft_full or "),
    Mistake("rlhf", "+exp=dpo_qwen72b_lora", "-> +exp=recipes/qwen3-8b/dpo"),
    Mistake("rlhf", "sft_qlora", "-> +exp=sft_qlora"),
    Mistake("rlhf", f"{RUN};+train=dpo", "-> train=dpo"),
    Mistake("rlhf", f"{RUN};zero=3", "-> zero=zero3"),
    Mistake("rlhf", f"{RUN};train.epochs=1,2", "--multirun train.epochs=1,2"),
    Mistake("rlhf", "--multirun;train.lrr=1", "-> train.lr=1"),
    Mistake("rlhf", f"{RUN};train.lr;1e-4", "-> train.lr=1e-4"),
    Mistake("rlhf", f"{RUN};plan:true", "-> plan=true"),
    Mistake("rlhf", f"{RUN};chain={{sft:[train=sft]}}", """'+chain={sft:["train=sft"]}'"""),
    Mistake("rlhf", "+exp=dpo;data.sources=[{path:;a.json}]", "-> data.sources='[{path: a.json}]'"),
    Mistake("rlhf", "--model_name_or_path;x;--bf16", "dashes -> model.path=x"),
    Mistake("rlhf", "chats.jsonl", "-> data.path=chats.jsonl"),
    Mistake("rlhf", f"{RUN};tracking.prometheus=no/m.prom", "-> tracking.prometheus=null"),
    Mistake("deliver", "adapter;out=new", "-> base=<"),
    Mistake("deliver", "adapter;base=model;out=taken", "-> out=<another folder>"),
    Mistake("deliver", "adapter;model;out=new", "-> source=adapter base=<folder>"),
    Mistake("audit", "adapter;fix=true", "-> out_dir=<a new folder>"),
    Mistake("deliver", "adapter;base=model;out=new;convert:dtype=float16", "convert.dtype=float16"),
    Mistake("prune", "keep=1;older_than:30", "-> older_than=30"),
]  # fmt: skip
JOBS: dict[str, Callable[[Composed, list[str]], int]] = {
    "rlhf": lambda composed, overrides: check(chain_steps(composed, overrides)) or 0,
    "deliver": lambda composed, _: plan(composed) and 0,
    "audit": audit_command._job,
    "prune": lambda _composed, _overrides: 0,
}


def test_each_mistake_is_answered_in_three_lines_with_a_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each exits with status 2 and leaves the folder as it was."""
    make_adapter(tmp_path / "adapter")
    make_model(tmp_path / "model")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("of the user")
    (tmp_path / "chats.jsonl").write_text("{}\n")
    before = sorted(tmp_path.rglob("*"))
    wrong = {}
    for mistake in MISTAKES:
        status = run_main(mistake.program, JOBS[mistake.program], argv=mistake.typed.split(";"))
        printed = capsys.readouterr()
        if (
            status != 2
            or mistake.answer not in printed.err
            or len(printed.err.splitlines()) > 3
            or printed.out
        ):
            wrong[mistake.typed] = (status, printed)
    assert wrong == {}
    assert sorted(tmp_path.rglob("*")) == before
    assert run_main("rlhf", JOBS["rlhf"], argv=[]) == 2
    assert "python flows/rlhf.py --help" in capsys.readouterr().err


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


def test_cfg_job_prints_no_password(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@localhost:5000")
    assert run_main("rlhf", Job(), argv=["+exp=sft_qlora", "--cfg", "job"]) == 0
    printed = capsys.readouterr().out
    assert "uri: http://me:***@localhost:5000" in printed
    assert "secret" not in printed
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://me:secret@localhost:5000"


def test_a_setting_that_is_set_twice_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("rlhf", Job(), argv=["seed=1", "train.lr=1e-4", "seed=2"]) == 2
    assert "seed is set twice" in capsys.readouterr().err
    for words in (["seed=1", "seed=1"], ["sft:seed=1", "seed=2"]):
        assert repeated(words) == []


NAMES = [
    "a b", "a,b", "x=1", "a[1]", "a{b", "a (1)", "a:b", "1e3", "~t", "it's", 'q"q', "${x}", "$HOME",
    "\u6a21\u578b", "back\\slash", "end\\",
]  # fmt: skip


def test_paths_are_taken_before_the_grammar_and_printed_ones_can_be_typed(tmp_path: Path) -> None:
    """Whatever a folder is called, as a value of a setting and without its key."""

    def words_of(word: str) -> list[str]:
        return read([word, "values=true"], vocabulary("audit")).overrides

    def source_of(word: str) -> str:
        return str(compose_config(words_of(word), config_name="audit").settings["source"])

    commands = [f"printf '%s\\0' {typed('source', tmp_path / name)}" for name in NAMES]
    printed = subprocess.run(
        ["sh", "-c", "; ".join(commands)], capture_output=True, check=True
    ).stdout  # fmt: skip
    assert list(map(source_of, printed.decode().split("\0")[:-1])) == [
        f"{tmp_path / name}" for name in NAMES
    ], "the folders need not exist"
    wrong = []
    for name in NAMES:
        (tmp_path / name).mkdir()
        relative = f"{tmp_path / name}" if name[0] == "~" else f"./{name}"  # "~t" is a home
        word = f"source={relative}"
        if source_of(word) != relative or words_of(word) != words_of(relative):
            wrong.append(name)
    assert wrong == []
    file = tmp_path / "a,b [1].jsonl"
    file.touch()
    (word,) = read([f"sft:data.path={file}"], vocabulary("rlhf")).for_steps
    _, by_step = split([word])
    assert compose_config(by_step["sft"]).settings["data"]["path"] == str(file)


def test_help_has_every_setting_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    for name in sorted(SCHEMAS):
        assert run_main(name, Job(), argv=["--help"]) == 0
        text = capsys.readouterr().out
        listed = re.findall(r"^  ([a-z_.]+[a-z0-9_]*)=", text, flags=re.M)
        names = vocabulary(name)
        assert set(listed) >= set(names.settings), name
        assert [key for key in names.settings if not setting_help(key, names)] == []


def test_every_name_of_another_trainer_leads_to_settings_that_exist() -> None:
    for program_name in sorted(SCHEMAS):
        names = vocabulary(program_name)
        for peer in PEERS[program_name]:
            assert not names.has(peer), f"{peer} is a name of ours"
            for override in translate(program_name, peer, "x").split(" "):
                key, equals, value = override.partition("=")
                if not equals:
                    continue  # within <...>
                assert names.has(key), override
                plain = value in names.groups.get(key, ()) or value[:1] in "<x" or value == "zerox"
                assert plain or not names.is_section(key), override


def test_every_command_is_in_the_help_and_has_a_module(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plumbline(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["plumbline", *words])
        with pytest.raises(SystemExit) as end:
            program.main()
        return int(end.value.code or 0)

    assert plumbline("help") == 0
    text = capsys.readouterr().out
    for command, module in program.COMMANDS.items():
        assert f"    plumbline {command} " in text
        assert callable(import_module(f"flows.commands.{module}").main)
    assert plumbline("audti", "x") == 2
    assert "plumbline audit x" in capsys.readouterr().err
