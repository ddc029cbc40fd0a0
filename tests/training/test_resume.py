"""A resumed run equals an uninterrupted one: same losses, same final bytes."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.core.errors import TrainingError
from tasks.training.engine.checkpoint import complete
from tasks.training.engine.saving import convert
from tasks.training.job import TrainJob
from tests.training.jobs import DEFAULT, RESUMES, Trained
from tests.training.places import (
    at_step,
    kill_ranks,
    losses,
    make_job,
    require_same_artifact,
    require_same_weights,
    results,
    run_jobs,
    run_train,
)

pytestmark = pytest.mark.timeout(2400)
CONVERTIBLE = ("qlora_2", "fp32_2", "full_3")


@pytest.mark.parametrize(
    "name",
    [
        name if f"again_{name}" in DEFAULT else pytest.param(name, marks=pytest.mark.slow)
        for name in RESUMES
    ],
)
def test_every_byte_that_is_published_is_equal(trained: Trained, name: str) -> None:
    whole, again = trained[f"whole_{name}"], trained[f"again_{name}"]
    assert len(losses(whole)) == RESUMES[name].batch.max_steps
    assert len(set(losses(whole))) > 1, "it learns nothing"
    require_same_artifact(whole.out, again.out)
    steps = [path.name for path in complete(again.checkpoints)]
    assert "step-00000004" in steps
    assert "step-00000002" not in steps, "it started from the beginning"


@pytest.mark.slow
def test_overflowing_float16_steps_are_skipped(trained: Trained) -> None:
    """With the scale of step 2 lost, the resumed run would skip more of them and differ."""
    metrics = results(trained["whole_half_2"])["metrics"]
    assert metrics["steps"] == RESUMES["half_2"].batch.max_steps
    assert metrics["heldout_loss_after"] < metrics["heldout_loss_before"]


@pytest.fixture(scope="module")
def alone(trained: Trained) -> Mapping[str, TrainJob]:
    """Resume from the checkpoints of step 2 with one rank instead of two."""
    root, jobs = trained.folder / "alone", {}
    for name in CONVERTIBLE:
        whole, settings = trained[f"whole_{name}"], RESUMES[name]
        settings = replace(settings, launch=replace(settings.launch, nproc=1))
        half_way, universal = whole.checkpoints / "step-00000002", root / f"universal-{name}"
        convert(half_way, universal)
        files = {"resume": half_way, "universal": universal}
        jobs[name] = make_job(root / name, settings, whole.base, whole.data, **files)
    run_jobs(root, list(jobs.values()), nproc=1)
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_another_number_of_ranks_differs_by_rounding(
    name: str, trained: Trained, alone: Mapping[str, TrainJob]
) -> None:
    """Sums have another order; dropout depends on the rank, so only its first step is compared."""
    whole = trained[f"whole_{name}"]
    expected, measured = losses(whole), losses(alone[name])
    assert measured[:2] == expected[:2]
    assert measured[2] == pytest.approx(expected[2], rel=3e-2)
    if RESUMES[name].peft.dropout == 0:
        fp32 = RESUMES[name].dtype == "float32"
        assert measured == pytest.approx(expected, rel=1e-5 if fp32 else 1e-2)
    if name == "fp32_2":
        require_same_weights(whole.out, alone[name].out, tolerance=2e-5)


@pytest.mark.slow
def test_a_killed_and_restarted_run_equals_an_uninterrupted_one(
    tmp_path: Path, trained: Trained
) -> None:
    """All ranks get kill -9 after step 5, when the checkpoint of step 4 is the newest."""
    job, settings = trained["whole_kto"], replace(RESUMES["kto"], save_steps=2)
    folders = {name: tmp_path / name for name in ("whole", "killed")}
    inputs = (job.base, job.data, settings)
    how = {"max_truncated": 0.4}
    run_train(folders["whole"], *inputs, **how)

    kill = at_step(5, lambda: kill_ranks(folders["killed"], signal.SIGKILL))
    with pytest.raises(TrainingError, match="SIGKILL"):
        run_train(folders["killed"], *inputs, observe=kill, **how)
    (folders["killed"] / "out").rename(folders["killed"] / "broken")
    report = run_train(folders["killed"], *inputs, **how)
    assert report.notes["resumed_after_step"] >= 2
    require_same_artifact(folders["whole"] / "out", folders["killed"] / "out")
