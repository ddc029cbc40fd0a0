"""Run by ranks: train several jobs in turn with the product's code, in one group of ranks.

python -m tests.ranks COUNT tests.training.run_jobs JOB.json ... [FOLDER]

Importing DeepSpeed takes longer than all of these trainings. Beside `out`, a job on data gets the
folder `start`: its trained tensors before the first step. FOLDER is for `measure_engines`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from tasks.process.torch_process import start_lean
from tasks.training.job import TrainJob

PASSES = 16


def accept_float16() -> None:
    """Let DeepSpeed compute float16 on this CPU, and begin with a loss scale that overflows.

    torch computes float16 on any CPU, slowly without AVX-512 FP16, and DeepSpeed refuses to. These
    small gradients overflow at a scale of 2**24 as those of a large model do at 2**16.
    """
    from deepspeed.accelerator import get_accelerator

    from tasks.training import run

    type(get_accelerator()).is_fp16_supported = lambda self: True
    own = run.deepspeed_config

    def overflowing(*args: Any, **more: Any) -> dict[str, Any]:
        config = own(*args, **more)
        if "fp16" in config:
            config["fp16"]["initial_scale_power"] = 24
        return config

    run.deepspeed_config = overflowing


def train_one(ranks: Any, job: TrainJob) -> None:
    """Train a job; if it fails, write the error, which every rank has alike."""
    from tasks.core.events import emit
    from tasks.training.engine.failure import explain

    if ranks.first:
        emit("run", name=job.out.parent.name)
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
    """Train a job on data, and write its tensors before the first step to `start`."""
    from tasks.training import run
    from tasks.training.engine.deepspeed_engine import (
        own_partitions,
        start_engine,
        write_partitions,
    )

    def recorded(*args: Any) -> Any:
        engine = start_engine(*args)
        which = {"rank": ranks.rank, "world_size": ranks.world_size}
        write_partitions(own_partitions(engine.module, **which), job.out.parent / "start", **which)
        return engine

    run.start_engine = recorded
    run.train_with(ranks, job, time.time())


def measure_engines(ranks: Any, folder: Path) -> None:
    """Write `sums.json`: for each ZeRO stage a gradient and weights, see `add_up`."""
    measures = [add_up(ranks, stage) for stage in range(4)]
    if ranks.first:
        (folder / "sums.json").write_text(json.dumps(measures))


def add_up(ranks: Any, stage: int) -> list[float]:
    """Return an accumulated gradient, and weight and bias after a step of weight decay alone.

    The gradient is 256 in the first micro-batch and 0.5 in the others, which bf16 cannot add to it.
    """
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_grad

    from tasks.training.engine.deepspeed_engine import start_engine
    from tasks.training.engine.zero_config import deepspeed_config
    from tasks.training.job import Zero
    from tests.settings import Batch, Optim, Settings

    batch = Batch(micro_batch_size=1, global_batch_size=PASSES * ranks.world_size)
    optim = Optim(lr=0.0, weight_decay=0.5, max_grad_norm=0.0)
    settings = Settings(dtype="bfloat16", zero=Zero(stage), batch=batch, optim=optim)
    model = torch.nn.Linear(4, 4).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    engine: Any = start_engine(model, deepspeed_config(settings, ranks.world_size), optim)
    for lr, sizes in ((0.5, [0.0] * PASSES), (0.0, [256.0] + [0.5] * (PASSES - 1))):
        for group in engine.optimizer.param_groups:
            group["lr"] = lr
        for place, size in enumerate(sizes):
            if place:
                engine.step()
            out = engine(torch.ones(1, 4, dtype=torch.bfloat16, device=ranks.device))
            engine.backward(out.sum() * size)
        gradient = float(safe_get_full_grad(model.weight).flatten()[0])
        engine.step()
    parameters = list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=stage == 3):
        after = [float(p.flatten()[0]) for p in parameters]
    engine.destroy()
    return [gradient, *after]


def main(arguments: list[str]) -> None:
    """Train all jobs in this process group, each with its own sharing of rows."""
    start_lean()
    from tasks.process.torch_process import end_process
    from tasks.training.engine.deepspeed_engine import Ranks

    paths = [Path(argument) for argument in arguments]
    jobs = [TrainJob.read(path) for path in paths if path.suffix == ".json"]
    ranks = {}
    for sharing in sorted({1, *(job.settings.launch.sequence_parallel for job in jobs)}):
        ranks[sharing] = Ranks(timeout_s=600.0, sequence_parallel=sharing)
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
