"""A resumed run equals an uninterrupted one, byte for byte; ranks that die end the run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.core.errors import StageProcessError, TrainingError
from tasks.train import _Events, _launch
from tasks.training.engine.checkpoint import complete
from tasks.training.engine.failure import (
    MARGIN_S,
    WATCHDOG,
    collective_timeout_s,
    explain,
    ran_out_of_memory,
    smaller,
)
from tasks.training.engine.saving import convert
from tasks.training.job import Peft, TrainJob, Zero
from tests.settings import Batch, Launch, Optim, Settings
from tests.training.jobs import DEFAULT, RESUMES, Trained
from tests.training.places import (
    LOG,
    at_step,
    losses,
    make_job,
    rank_pids,
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


def test_a_run_that_fails_after_the_last_step_repeats_none(trained: Trained) -> None:
    whole, ended = trained["whole_lora_3"], trained["ended_lora_3"]
    require_same_artifact(whole.out, ended.out)
    assert results(ended)["metrics"]["train_s"] == results(whole)["metrics"]["train_s"]


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


SETTINGS = Settings(
    peft=Peft("lora", rank=4, alpha=8, dropout=0.1, target_modules=("q_proj", "down_proj")),
    zero=Zero(3),
    optim=Optim(lr=5e-3, warmup_ratio=0.1),
    batch=Batch(micro_batch_size=8, global_batch_size=32, max_steps=7, max_len=64),
    save_steps=2,
    probes=3,
)
ENDLESS = replace(SETTINGS, batch=replace(SETTINGS.batch, max_steps=100_000))


@pytest.mark.slow
def test_a_rank_that_is_stopped_ends_all_of_them(tmp_path: Path, base: Path, dataset: Path) -> None:
    settings = replace(ENDLESS, launch=Launch(collective_timeout_s=15))
    ended: list[float] = []

    def stop() -> None:
        os.kill(rank_pids(tmp_path)[1], signal.SIGSTOP)
        ended.append(time.monotonic())

    with pytest.raises((TrainingError, StageProcessError)) as caught:
        run_train(tmp_path, base, dataset, settings, observe=at_step(5, stop))
    assert time.monotonic() - ended[0] < 60
    assert all(name in caught.value.report() for name in ("rank 0", "15 s"))
    assert rank_pids(tmp_path) == []
    assert complete(tmp_path / "checkpoints")


def test_ranks_that_wait_too_long_or_are_killed_name_the_setting(
    tmp_path: Path, base: Path
) -> None:
    """NCCL ends the process and raises nothing; rollouts may take longer than a step."""
    settings = replace(SETTINGS, launch=Launch(collective_timeout_s=400))
    job = TrainJob(settings, base, "b", *[tmp_path] * 3)
    for line, named, hint in (
        (f"[rank1]: {WATCHDOG}: x", "waited 400 s", "train.collective_timeout_s"),
        ("rank 1 (pid 7): SIGKILL", "SIGKILL", "train.micro_batch_size=4"),
    ):

        def run(*_: object, last: str = line, **__: object) -> list[str]:
            raise StageProcessError("train", 1, [last, "exit status 1"])

        with pytest.raises(TrainingError, match=named) as caught:
            _launch(job, run, _Events(None, LOG, 64), None, {})
        assert hint in caught.value.hint
    for seconds, wanted in ((900, 900 + MARGIN_S), (10, 400)):
        online = {"rollout": {"timeout_s": seconds}}
        job = replace(job, settings=replace(settings, online=online))
        assert collective_timeout_s(job) == wanted


def test_out_of_memory_names_rank_and_settings(tmp_path: Path, base: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert ran_out_of_memory(caught.value)
    assert ran_out_of_memory(MemoryError())
    assert ran_out_of_memory(RuntimeError("could not create a primitive"))  # oneDNN's
    lacking = "could not create a primitive descriptor for the matmul primitive"
    for other in ("shapes do not match", lacking):
        assert not ran_out_of_memory(RuntimeError(other))
    error = explain(caught.value, TrainJob(SETTINGS, base, "b", *[tmp_path] * 3), 1)
    assert error is not None
    assert "rank 1" in error.message
    assert "train.micro_batch_size=4" in error.hint
    full = Settings(batch=Batch(micro_batch_size=1, max_len=4096))
    assert smaller(full) == [
        "train.gradient_checkpointing=true", "zero=zero3", "zero.offload_optimizer=cpu",
        "peft=lora", "train.max_len=2048",
    ]  # fmt: skip
    quantised = replace(full, peft=Peft("qlora"), gradient_checkpointing=True, zero=Zero(2))
    assert smaller(quantised) == ["zero.offload_optimizer=cpu", "train.max_len=2048"]
