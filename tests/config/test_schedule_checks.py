"""Checks of evaluations, schedules and resuming."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.config.checks import ranges
from tasks.config.checks.machine import checkpoints
from tasks.training.engine.checkpoint import Progress, describe, publish, work_folder

TRAIN: dict[str, Any] = {
    "objective": "dpo",
    "best_metric": "accuracy",
    "eval_steps": 10,
    "keep": "best",
    "early_stop_patience": 3,
    "scheduler": "cosine",
    "min_lr_ratio": 0.0,
    "decay_ratio": 0.1,
    "power": 1.0,
    "num_cycles": 1,
}


def test_valid_settings_pass() -> None:
    assert ranges.evaluation(TRAIN) == []
    assert ranges.schedule(TRAIN) == []
    assert ranges.schedule({**TRAIN, "scheduler": "polynomial", "power": 2.0}) == []


def test_a_metric_that_is_not_measured() -> None:
    (finding,) = ranges.evaluation({**TRAIN, "objective": "sft"})
    assert str(finding) == (
        "train.best_metric: accuracy with train.objective=sft; loss -> train.best_metric=loss"
    )


def test_the_best_checkpoint_needs_evaluations() -> None:
    findings = ranges.evaluation({**TRAIN, "eval_steps": 0})
    assert [finding.what for finding in findings] == ["train.keep", "train.early_stop_patience"]
    assert all("train.eval_steps=<steps>" in finding.override for finding in findings)


@pytest.mark.parametrize(
    ("knob", "value", "offered"),
    [
        ("min_lr_ratio", 0.1, "cosine_with_min_lr"),
        ("decay_ratio", 0.2, "warmup_stable_decay"),
        ("power", 2.0, "polynomial"),
        ("num_cycles", 3, "cosine_with_restarts"),
    ],
)
def test_an_option_that_the_schedule_does_not_read(knob: str, value: float, offered: str) -> None:
    (finding,) = ranges.schedule({**TRAIN, knob: value})
    assert finding.what == f"train.{knob}"
    assert f"train.scheduler={offered}" in finding.override


def test_a_folder_to_resume_from(tmp_path: Path) -> None:
    assert ranges.resume("auto") == ranges.resume("never") == []
    (gone,) = ranges.resume(str(tmp_path / "gone"))
    (empty,) = ranges.resume(str(tmp_path))
    assert "does not exist" in gone.found
    assert "no complete checkpoint" in empty.found
    work = work_folder(tmp_path, 3)
    work.mkdir()
    describe(work, world_size=1, identity={}, progress=Progress(3), files={})
    made = publish(work)
    assert ranges.resume(str(tmp_path)) == ranges.resume(str(made)) == []


def test_disk_space_for_checkpoints_is_counted() -> None:
    each = 16_000
    assert checkpoints(1000, most=3, most_gb=None) == 5 * each
    assert checkpoints(1000, most=0, most_gb=None) == 6 * each
    assert checkpoints(1000, most=20, most_gb=1e-5) == 10_000 + 2 * each
