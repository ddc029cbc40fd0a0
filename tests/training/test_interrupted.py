"""Real ranks that die, are stopped, or meet a full disk, no memory or NaN."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks.core.errors import StageProcessError, TrainingError
from tasks.training.engine.checkpoint import complete
from tasks.training.engine.failure import explain, ran_out_of_memory, smaller
from tasks.training.job import Peft, TrainJob, Zero
from tests.settings import Batch, Launch, Optim, Settings
from tests.training.places import at_step, rank_pids, run_train

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
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_a_rank_that_is_stopped_or_dies_ends_all_of_them(
    tmp_path: Path, base: Path, dataset: Path, number: int
) -> None:
    settings = replace(ENDLESS, launch=Launch(collective_timeout_s=15))
    ended: list[float] = []

    def end() -> None:
        os.kill(rank_pids(tmp_path)[1], number)
        ended.append(time.monotonic())

    with pytest.raises((TrainingError, StageProcessError)) as caught:
        run_train(tmp_path, base, dataset, settings, observe=at_step(5, end))
    assert time.monotonic() - ended[0] < 60
    report = caught.value.report()
    stopped = number == signal.SIGSTOP
    assert all(name in report for name in (("rank 0", "15 s") if stopped else ("SIGKILL",)))
    assert rank_pids(tmp_path) == []
    assert complete(tmp_path / "checkpoints")


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
