"""Run by torchrun for `tests/gpu`: measure the peak memory of a rank in a few steps.

On a CPU it is the growth of resident memory after all libraries are imported, on a GPU the memory
allocated by torch. The peak is reset before each phase.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from tasks.process.exit_process import end_process
from tasks.training.engine.deepspeed_engine import Ranks, start_engine
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import TrainJob
from tasks.training.losses import ModelOutput, objective
from tasks.training.model.build import load_model, load_tokenizer
from tasks.training.tokens.examples import open_examples
from tasks.training.tokens.order import Order
from tasks.training.tokens.packing import pack

T = TypeVar("T")


def resident(name: str = "VmRSS") -> int:
    """Return the resident bytes of this process; `VmHWM` is their peak since the last reset."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(f"{name}:"))


class Peaks:
    """Peak memory of each phase, above the memory at the start."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._before = resident()
        self.peaks: dict[str, int] = {}

    def during(self, phase: str, work: Callable[[], T]) -> T:
        """Return the result of `work`, and record its peak."""
        if self._gpu:
            torch.cuda.reset_peak_memory_stats()
            result = work()
            self.peaks[phase] = torch.cuda.max_memory_allocated()
            return result
        Path("/proc/self/clear_refs").write_text("5")
        result = work()
        self.peaks[phase] = resident("VmHWM") - self._before
        return result


def take_steps(engine: Any, job: TrainJob, ranks: Ranks) -> list[float]:
    """Take the steps of a job on its tokenised data; return their losses."""
    chosen = objective(job.settings.objective, vars(job.settings.loss))
    examples = open_examples(job.data, ("text",))
    order = Order(examples, job.settings.batch, seed=job.settings.seed, world_size=ranks.world_size)
    losses = []
    for step in range(1, order.steps + 1):
        todo = order.step(step, ranks.rank)
        total = 0.0
        for row in todo.rows:
            packed = pack(examples, row.chosen).to(ranks.device)
            output = ModelOutput(logprobs=engine(row=packed))
            value = chosen.loss(output, packed, todo.counts).value * row.counted
            engine.backward(value * len(todo.rows) * ranks.world_size)
            engine.step()
            total += float(value.detach())
        losses.append(sum(ranks.all_objects(total)))
    return losses


def main(path: Path) -> None:
    job = TrainJob.read(path)
    ranks = Ranks()
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    if job.settings.peft.kind != "none":
        import bitsandbytes  # noqa: F401
        import peft  # noqa: F401
    config = deepspeed_config(job.settings, ranks.world_size, gpu=ranks.gpu)
    tokenizer = load_tokenizer(job)
    peaks = Peaks(ranks.device)
    model = peaks.during("load", lambda: load_model(job, ranks, config, tokenizer=tokenizer))
    engine = peaks.during("start", lambda: start_engine(model, config, job.settings.optim))
    losses = peaks.during("train", lambda: take_steps(engine, job, ranks))
    ranks.barrier()
    ranks.barrier()
    everyone = ranks.all_objects({"peaks": peaks.peaks, "losses": losses})
    assert all(module.training for module in engine.module.modules())  # or nothing is checkpointed
    if ranks.first:
        (job.out / "memory.json").write_text(json.dumps(everyone))
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
