"""The command line: exit statuses, sweeps, help, and nothing written outside `paths.runs`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from flows import program
from flows.cli.arguments import read, split
from flows.cli.config import SCHEMAS, Composed, compose_config, vocabulary
from flows.cli.entry import run_main
from flows.cli.peer_names import PEERS, translate
from flows.cli.usage import setting_help
from tasks.core.terminal import typed
from tests.commands import environment
from tests.conftest import PROJECT


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Job:
    """A job that records its arguments; its status is `zero.stage`."""

    def __init__(self) -> None:
        self.seen: list[tuple[Composed, list[str]]] = []

    def __call__(self, composed: Composed, overrides: list[str]) -> int:
        self.seen.append((composed, overrides))
        return int(composed.settings["zero"]["stage"])


def test_one_job_gets_settings_and_overrides_and_decides_the_status(tmp_path: Path) -> None:
    job = Job()
    assert run_main("rlhf", job, argv=["+exp=lora_zero3", "train.lr=0.5"]) == 3
    ((composed, overrides),) = job.seen
    assert overrides == ["+exp=lora_zero3", "train.lr=0.5"]
    assert compose_config(overrides) == composed
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_runs_every_job_and_returns_the_worst(tmp_path: Path) -> None:
    job = Job()
    assert run_main("rlhf", job, argv=["zero.stage=1,3,0", "--multirun"]) == 3
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert written == [Path("runs/hydra/multirun.yaml")]
    assert [overrides for _, overrides in job.seen] == [[f"zero.stage={n}"] for n in (1, 3, 0)]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--multirun", "train.lrr=1"], "-> train.lr=1"),
        (["+exp=qlorra"], "-> +exp=qlora or "),
        (["+exp=sft_qlora", "chain={sft:[train=sft]}"], """'+chain={sft:["train=sft"]}'"""),
        ([], "python flows/rlhf.py --help"),
    ],
    ids=str,
)
def test_a_wrong_command_is_2_and_starts_nothing(
    words: list[str], answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job()
    assert run_main("rlhf", job, argv=words) == 2
    assert job.seen == []
    assert answer in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_info_and_completion_stay_hydras(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job()
    assert run_main("rlhf", job, argv=["+exp=sft_full", "--info", "defaults"]) == 0
    assert "exp/sft_full" in capsys.readouterr().out
    monkeypatch.setenv("COMP_LINE", "python rlhf.py train=re")
    monkeypatch.setenv("COMP_POINT", str(len("python rlhf.py train=re")))
    assert run_main("rlhf", job, argv=["-sc", "query=bash"]) == 0
    completed = capsys.readouterr().out.splitlines()[-1].split()
    assert completed == ["train=reinforce_pp", "train=reinforce_pp_baseline", "train=reward"]
    assert job.seen == []


def test_of_two_config_dirs_both_count_and_help_lists_their_experiments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name in ("first", "second"):
        (tmp_path / name / "exp").mkdir(parents=True)
        file = tmp_path / name / "exp" / f"{name}.yaml"
        file.write_text(f"# @package _global_\n\n# About {name}.\ntag: {name}\n")
        folders.append(f"--config-dir={tmp_path / name}")
    job = Job()
    for name in ("first", "second"):
        assert run_main("rlhf", job, argv=[*folders, f"+exp={name}"]) == 2
    assert [composed.settings["tag"] for composed, _ in job.seen] == ["first", "second"]
    # A worker gets the overrides alone.
    assert compose_config(job.seen[0][1]).settings["tag"] == "first"
    assert run_main("rlhf", job, argv=[*folders, "--help"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["+exp=second", "About", "second."] in lines


def test_cfg_job_prints_no_password(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@localhost:5000")
    assert run_main("rlhf", Job(), argv=["+exp=sft_qlora", "--cfg", "job"]) == 0
    printed = capsys.readouterr().out
    assert "uri: http://me:***@localhost:5000" in printed
    assert "secret" not in printed
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://me:secret@localhost:5000"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["seed=1", "train.lr=1e-4", "seed=2"], ["seed"]),
        (["model.path=a", "model.path=b", "+exp=sft_full"], ["model.path"]),
        (["seed=1", "seed=1"], []),
        (["sft:seed=1", "seed=2"], []),
    ],
)
def test_a_setting_that_is_set_twice_is_said(
    words: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_main("rlhf", Job(), argv=words)
    warned = [line for line in capsys.readouterr().err.splitlines() if "set twice" in line]
    assert [line.split()[1] for line in warned] == names


NAMES = [
    "a b", "a,b", "x=1", "a[1]", "a{b", "a (1)", "a:b", "1e3", "~t", "it's", 'q"q', "${x}", "$HOME",
    "\u6a21\u578b", "back\\slash", "end\\",
]  # fmt: skip


def test_paths_are_taken_before_the_grammar(tmp_path: Path) -> None:
    """Whatever a folder is called, as a value of a setting and without its key."""
    wrong = []
    for name in NAMES:
        (tmp_path / name).mkdir()
        relative = f"{tmp_path / name}" if name[0] == "~" else f"./{name}"  # "~t" is a home
        words = read([f"source={relative}", "values=true"], vocabulary("audit")).overrides
        source = compose_config(words, config_name="audit").settings["source"]
        if (
            source != relative
            or read([relative, "values=true"], vocabulary("audit")).overrides != words
        ):
            wrong.append((name, source))
    assert wrong == []
    file = tmp_path / "a,b [1].jsonl"
    file.touch()
    (word,) = read([f"sft:data.path={file}"], vocabulary("rlhf")).for_steps
    _, by_step = split([word])
    assert compose_config(by_step["sft"]).settings["data"]["path"] == str(file)


def test_printed_settings_are_read_back_through_a_shell(tmp_path: Path) -> None:
    """The folders need not exist."""
    commands = [f"printf '%s\\0' {typed('source', tmp_path / name)}" for name in NAMES]
    printed = subprocess.run(
        ["sh", "-c", "; ".join(commands)], capture_output=True, check=True
    ).stdout  # fmt: skip
    sources = []
    for word in printed.decode().split("\0")[:-1]:
        words = read([word], vocabulary("audit")).overrides
        sources.append(compose_config(words, config_name="audit").settings["source"])
    assert sources == [f"{tmp_path / name}" for name in NAMES]


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


def test_a_python_without_the_libraries_gets_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-S", str(PROJECT / "flows" / "rlhf.py"), "source=x"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.endswith(f"/.venv/bin/python {PROJECT}/flows/rlhf.py source=x")


@pytest.fixture
def plumbline(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str, str]]:
    """Run `plumbline ...` in this process; return exit status, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["plumbline", *words])
        with pytest.raises(SystemExit) as end:
            program.main()
        assert isinstance(end.value.code, int)
        return end.value.code, *capsys.readouterr()

    return run


def test_every_command_is_in_the_help_and_has_a_module(plumbline: Any) -> None:
    status, text, _ = plumbline("help")
    assert status == 0
    for command, module in program.COMMANDS.items():
        assert f"    plumbline {command} " in text
        assert callable(import_module(f"flows.commands.{module}").main)
    status, _, errors = plumbline("audti", "x")
    assert status == 2
    assert "plumbline audit x" in errors


@pytest.mark.slow
def test_a_plan_as_a_process_starts_nothing(tmp_path: Path) -> None:
    """As the script `plumbline` does it, in a folder that is not the checkout."""
    start = f"import sys; sys.argv[0] = 'plumbline'; sys.path.insert(0, {str(PROJECT)!r}); "
    start += "from flows.program import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", start, "plan", "+exp=sft_qlora"],
        cwd=tmp_path, env=environment(), timeout=120, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "prepare_data  to run" in done.stdout
    assert list(tmp_path.iterdir()) == []
