"""The command line: exit statuses, sweeps, and nothing written outside `paths.runs`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from flows.cli.arguments import read, split
from flows.cli.config import Composed, compose_config, vocabulary
from flows.cli.entry import run_main
from tasks.core.terminal import typed
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
    assert run_main("rlhf", job, argv=["--multirun", "zero.stage=1,3,0"]) == 3
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert written == [Path("runs/hydra/multirun.yaml")]
    assert [overrides for _, overrides in job.seen] == [[f"zero.stage={n}"] for n in (1, 3, 0)]


@pytest.mark.parametrize("flags", [[], ["--multirun"]])
def test_schema_errors_are_2_and_start_nothing(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job()
    assert run_main("rlhf", job, argv=[*flags, "train.lrr=1"]) == 2
    assert job.seen == []
    assert "train.lrr is not a setting" in capsys.readouterr().err


def test_unknown_experiment_is_2_and_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("rlhf", Job(), argv=["+exp=qlorra"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "+exp=qlorra: there is no experiment 'qlorra'"
    assert lines[-1].startswith("  -> +exp=qlora or ")


def test_malformed_override_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("rlhf", Job(), argv=["train.lr=["]) == 2
    assert "'[' is not closed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("chain={sft:[train=sft]}", """'+chain={sft:["train=sft"]}'"""),
        ('chain.sft=["train=sft"]', "'+chain.sft=<value>'"),
    ],
)
def test_steps_on_the_command_line(
    override: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main("rlhf", Job(), argv=["+exp=sft_qlora", override]) == 2
    assert hint in capsys.readouterr().err
    if "<" not in hint:
        job = Job()
        run_main("rlhf", job, argv=["+exp=sft_qlora", hint.strip("'")])
        assert job.seen[0][0].settings["chain"] == {"sft": ["train=sft"]}


@pytest.mark.parametrize("program", ["rlhf", "deliver", "audit", "verify"])
def test_without_arguments_help_is_shown_and_nothing_runs(
    program: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job()
    assert run_main(program, job, argv=[]) == 2
    assert job.seen == []
    assert f"python flows/{program}.py --help" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_flags_may_stand_anywhere(tmp_path: Path) -> None:
    job = Job()
    assert run_main("rlhf", job, argv=["zero.stage=1", "--multirun", "seed=1,2"]) == 1
    assert [composed.settings["seed"] for composed, _ in job.seen] == [1, 2]


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


def test_config_dir_becomes_an_override_that_a_worker_can_use(tmp_path: Path) -> None:
    folder = tmp_path / "more" / "exp"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ntag: from a folder\n")
    job = Job()
    assert run_main("rlhf", job, argv=["--config-dir", "more", "+exp=mine"]) == 2
    composed, overrides = job.seen[0]
    assert composed.settings["tag"] == "from a folder"
    assert compose_config(overrides).settings["tag"] == "from a folder"


def test_of_two_config_dirs_both_count_and_help_lists_their_experiments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = []
    for name in ("first", "second"):
        (tmp_path / name / "exp").mkdir(parents=True)
        (tmp_path / name / "exp" / f"{name}.yaml").write_text(
            f"# @package _global_\n\n# About {name}.\ntag: {name}\n"
        )
        folders.append(f"--config-dir={tmp_path / name}")
    job = Job()
    for name in ("first", "second"):
        assert run_main("rlhf", job, argv=[*folders, f"+exp={name}"]) == 2
    searched = f"hydra.searchpath=[file://{tmp_path}/second]"
    assert run_main("rlhf", job, argv=[folders[0], searched, "+exp=first"]) == 2
    assert [composed.settings["tag"] for composed, _ in job.seen] == ["first", "second", "first"]
    capsys.readouterr()
    assert run_main("rlhf", job, argv=[*folders, "--help"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["+exp=first", "About", "first."] in lines
    assert ["+exp=second", "About", "second."] in lines


def test_the_documented_experiment_of_ones_own_composes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (PROJECT / "docs" / "training.md").read_text()
    text = page.split("## Your own experiments")[1].split("```yaml\n")[1].split("```")[0]
    folder = tmp_path / "mine" / "exp"
    folder.mkdir(parents=True)
    (folder / "support.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    job = Job()
    assert run_main("rlhf", job, argv=["--config-dir", "mine", "+exp=support"]) == 2
    settings = job.seen[0][0].settings
    assert (settings["peft"]["kind"], settings["peft"]["rank"]) == ("qlora", 64)
    assert (settings["train"]["lr"], settings["data"]["path"]) == (1e-4, "chats.jsonl")


def test_cfg_job_prints_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job()
    assert run_main("rlhf", job, argv=["+exp=sft_qlora", "--cfg", "job"]) == 0
    assert "double_quant: true" in capsys.readouterr().out
    assert job.seen == []


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
    ("words", "said"),
    [
        (["seed=1", "train.lr=1e-4", "seed=2"], ["seed"]),
        (["model.path=a", "model.path=b", "+exp=sft_full"], ["model.path"]),
        (["seed=1", "seed=1"], []),
        (["sft:seed=1", "seed=2"], []),
    ],
)
def test_a_setting_that_is_set_twice_is_said(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_main("rlhf", Job(), argv=words)
    warned = [line for line in capsys.readouterr().err.splitlines() if "set twice" in line]
    assert [line.split()[1] for line in warned] == said


NAMES = [
    "a b", "a,b", "x=1", "a[1]", "a{b", "a#b", "a (1)", "a:b", "1e3", "~t", "null.d", "it's", 'q"q',
    "\u6a21\u578b", "\u00e9t\u00e9", "back\\slash", "true",
    "end\\", "it\\'s", "${x}", "'q'", "a;b", "a&b", "$HOME",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_what_exists_as_a_path_is_taken_before_the_grammar(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    job = Job()
    relative = f"{tmp_path / name}" if name[0] == "~" else f"./{name}"  # "~t" is a user's home
    words = [f"model.path={tmp_path / name}", f"data.path=./{name}"]
    assert run_main("rlhf", job, argv=["model=hf", *words]) == 2  # `zero.stage` of the default
    ((composed, _),) = job.seen
    assert composed.settings["model"]["path"] == f"{tmp_path / name}"
    assert composed.settings["data"]["path"] == relative


@pytest.mark.parametrize("name", NAMES)
def test_a_printed_setting_is_read_back_through_a_shell(tmp_path: Path, name: str) -> None:
    made = subprocess.run(
        ["sh", "-c", f"printf '%s\\0' {typed('source', tmp_path / name)}"],
        capture_output=True, check=True,
    )  # fmt: skip
    (word,) = made.stdout.decode().split("\0")[:-1]  # a folder that does not exist, too
    words = read([word], vocabulary("audit")).overrides
    assert compose_config(words, config_name="audit").settings["source"] == f"{tmp_path / name}"


@pytest.mark.parametrize("name", ["a b", "lr=1e-4,wd=0", "it's [1]", "-x"])
def test_a_folder_without_its_key_is_taken_whatever_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    word = f"./{name}" if name[0] == "-" else name  # as every program has it
    words = read([word, "values=true"], vocabulary("audit")).overrides
    assert compose_config(words, config_name="audit").settings["source"] == word


def test_a_path_of_one_step_is_taken_before_the_grammar(tmp_path: Path) -> None:
    file = tmp_path / "a,b [1].jsonl"
    file.touch()
    (word,) = read([f"sft:data.path={file}"], vocabulary("rlhf")).for_steps
    _, by_step = split([word])
    assert compose_config(by_step["sft"]).settings["data"]["path"] == str(file)
