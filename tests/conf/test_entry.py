"""The command line: exit statuses, sweeps, and nothing written outside `paths.runs`."""

from __future__ import annotations

from pathlib import Path

import pytest

from flows.config import Composed, compose_config
from flows.entry import run_main


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Job:
    """Remembers what it was given; its status is `zero.stage`."""

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


def test_unknown_experiment_is_1_and_lists_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main("rlhf", Job(), argv=["+exp=qlorra"]) == 1
    said = capsys.readouterr().err
    assert "Could not find 'exp/qlorra'" in said
    listed = [line.strip() for line in said.splitlines() if line.startswith("\t")]
    assert {"lora_zero3", "qlora", "sft_full", "reward"} <= set(listed)


def test_malformed_override_is_1() -> None:
    assert run_main("rlhf", Job(), argv=["train.lr=["]) == 1


def test_config_dir_becomes_an_override_that_a_worker_can_use(tmp_path: Path) -> None:
    folder = tmp_path / "more" / "exp"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ntag: from a folder\n")
    job = Job()
    assert run_main("rlhf", job, argv=["--config-dir", "more", "+exp=mine"]) == 2
    composed, overrides = job.seen[0]
    assert composed.settings["tag"] == "from a folder"
    assert compose_config(overrides).settings["tag"] == "from a folder"


def test_cfg_job_prints_and_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    job = Job()
    assert run_main("rlhf", job, argv=["+exp=sft_qlora", "--cfg", "job"]) == 0
    assert "double_quant: true" in capsys.readouterr().out
    assert job.seen == []
