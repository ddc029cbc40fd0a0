"""Program for torchrun with two ranks: optimizer steps in which the second rank's gradient is NaN.

torchrun ... -m tests.rl.learner_program FOLDER

The loss itself is finite. Each rank writes FOLDER/RANK with lines `DTYPE STAGE: MOVED MESSAGE`:
whether the refused step has changed a weight, after a good step that has to.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.core.errors import TrainingError
from tasks.process.exit_process import end_process
from tasks.rl.learner import Learner
from tasks.training.engine.deepspeed_engine import Ranks, start_engine
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import TrainJob, Zero
from tasks.training.model.base import DTYPES
from tasks.training.objectives import Loss
from tests.settings import Batch, Settings


def whole(module: nn.Module) -> torch.Tensor:
    """The first weight, gathered."""
    import deepspeed

    weight = module[0].weight  # type: ignore[index]
    with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
        return weight.detach().float().clone()


def main(folder: Path) -> None:
    """Take a good step and a bad one with each ZeRO stage, in 16 and in 32 bits."""
    torch.set_num_threads(1)
    ranks, lines = Ranks(), []
    for dtype, stage in itertools.product(("bfloat16", "float32"), range(4)):
        settings = Settings(
            dtype=dtype, zero=Zero(stage),
            batch=Batch(micro_batch_size=1, global_batch_size=2 * ranks.world_size),
        )  # fmt: skip
        nowhere = Path("/nowhere")
        job = TrainJob(settings, nowhere, "", nowhere, nowhere, nowhere)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)).to(DTYPES[dtype])
        engine: Any = start_engine(
            model, deepspeed_config(settings, ranks.world_size), settings.optim
        )
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.05
        inputs = torch.ones(1, 3, dtype=DTYPES[dtype], device=ranks.device)
        learner = Learner(engine, ranks, job, whose="the test's", hint="")

        def loss_of(chosen: list[int], engine: Any = engine, inputs: Any = inputs) -> Loss:
            value = engine(inputs).float().square().sum()
            if chosen == [1] and not ranks.first:
                value = value + (0 * value).sqrt()  # 0, and infinity times 0 backwards
            return Loss(value, {})

        begun = whole(engine.module)
        norm = learner.step(1, [[0], [0]], loss_of)["grad_norm"]
        good = whole(engine.module)
        assert not torch.equal(good, begun)
        assert norm > 0
        message = "nothing"
        try:
            learner.step(2, [[0], [1]], loss_of)
        except TrainingError as error:
            message = error.message
        moved = not torch.equal(whole(engine.module), good)
        lines.append(f"{dtype} {stage}: {moved} {message}\n")
        engine.destroy()
        ranks.barrier()
    (folder / str(ranks.rank)).write_text("".join(lines))
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
