"""Run by torchrun: train several jobs in turn with the product's code, in one group of ranks.

torchrun ... -m tests.training.run_jobs JOB.json ... [FOLDER]

Importing DeepSpeed takes longer than all of these trainings. Beside `out`, a job gets the folder
`start`: its trained tensors before the first step. A job with a file `record` there also gets
`gradients.safetensors`, the full gradients of every step. FOLDER is for `engine_checks.py`.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tasks.process.block_unused_imports import start_lean
from tasks.training.job import TrainJob


class Recorder:
    """Writes what the tests compare beside a job's artifact."""

    def __init__(self, job: TrainJob, ranks: Any) -> None:
        self._folder = job.out.parent
        self._ranks = ranks
        self._gradients: dict[str, Any] = {}

    def watch(self, engine: Any) -> Any:
        """Write the tensors of a new engine; record its gradients."""
        from deepspeed.utils import safe_get_full_grad

        from tasks.training.engine.partitions import own_partitions, trainable, write_partitions

        ranks = {"rank": self._ranks.rank, "world_size": self._ranks.world_size}
        write_partitions(own_partitions(engine.module, **ranks), self._folder / "start", **ranks)
        step = engine.step

        def recorded_step(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                for name, parameter in trainable(engine.module).items():
                    gradient = safe_get_full_grad(parameter).float().clone()
                    self._gradients[f"{engine.global_steps}.{name}"] = gradient
            return step(*args, **kwargs)

        if (self._folder / "record").exists():
            engine.step = recorded_step
        return engine

    def save(self) -> None:
        from safetensors.torch import save_file

        if self._gradients and self._ranks.first:
            save_file(self._gradients, self._folder / "gradients.safetensors")


def accept_float16() -> None:
    """Let DeepSpeed compute float16 on this CPU, and begin with a loss scale that overflows.

    torch computes float16 on any CPU, slowly without AVX-512 FP16, and DeepSpeed refuses to. These
    small gradients overflow at a scale of 2**24 as those of a large model do at 2**16.
    """
    from deepspeed.accelerator import get_accelerator

    from tasks.training import run

    type(get_accelerator()).is_fp16_supported = lambda self: True
    own = run.deepspeed_config

    def overflowing(settings: Any, world_size: int, **more: Any) -> dict[str, Any]:
        config = own(settings, world_size, **more)
        if "fp16" in config:
            config["fp16"]["initial_scale_power"] = 24
        return config

    run.deepspeed_config = overflowing


def train_one(ranks: Any, job: TrainJob) -> None:
    """Train a job; if it fails, write the error, which every rank has alike."""
    from tasks.core.events import emit
    from tasks.training.engine.failure import explain

    if ranks.first:
        emit("run", name=job.out.name)
    try:
        if job.settings.online:
            from tasks.rl.run import train_with

            train_with(ranks, job, time.time())
        else:
            train_recorded(ranks, job)
    except Exception as error:
        explained = explain(error, job, ranks.rank)
        if ranks.first:
            text = explained.report() if explained else traceback.format_exc()
            (job.out / "failure").write_text(text)
    gc.collect()
    ranks.barrier()


def train_recorded(ranks: Any, job: TrainJob) -> None:
    """Train a job on data, and write what the tests compare."""
    from tasks.training import run
    from tasks.training.engine import deepspeed_engine

    recorder = Recorder(job, ranks)
    run.start_engine = lambda *args: recorder.watch(deepspeed_engine.start_engine(*args))
    run.train_with(ranks, job, time.time())
    recorder.save()


def main(arguments: list[str]) -> None:
    """Train all jobs in this process group, each with its own sharing of rows."""
    start_lean()
    from tasks.process.exit_process import end_process
    from tasks.training.engine.deepspeed_engine import Ranks
    from tests.training.engine_checks import measure_engines

    paths = [Path(argument) for argument in arguments]
    jobs = [TrainJob.read(path) for path in paths if path.suffix == ".json"]
    ranks = {}
    for sharing in sorted({1, *(job.settings.launch.sequence_parallel for job in jobs)}):
        ranks[sharing] = Ranks(timeout_s=120.0, sequence_parallel=sharing)
    if any(job.settings.dtype == "float16" for job in jobs):
        accept_float16()
    for job in jobs:
        train_one(ranks[job.settings.launch.sequence_parallel], job)
    for path in paths:
        if path.is_dir():
            measure_engines(ranks[1], path)
    ranks[1].leave()
    end_process()


if __name__ == "__main__":
    main(sys.argv[1:])
