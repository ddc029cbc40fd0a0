"""Program for torchrun with two ranks: steps of 64 micro-batches under each ZeRO stage.

torchrun ... -m tests.training.engine.gradients_program FOLDER

The gradient is 256 in the first micro-batch and 0.5 in the others, which bf16 cannot add to it.
Rank 0 writes FOLDER/STAGE.json: the accumulated gradient, and what a step before it, with weight
decay and without a gradient, left of matrix and bias.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.process.exit_process import end_process
from tasks.training.engine.deepspeed_engine import Ranks, start_engine
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import Zero
from tests.settings import Batch, Optim, Settings

PASSES = 64


def main(folder: Path) -> None:
    """Take the steps."""
    torch.set_num_threads(1)
    ranks = Ranks()
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    for stage in range(4):
        batch = Batch(micro_batch_size=1, global_batch_size=PASSES * ranks.world_size)
        optim = Optim(lr=0.0, weight_decay=0.5, max_grad_norm=0.0)
        settings = Settings(dtype="bfloat16", zero=Zero(stage), batch=batch, optim=optim)
        model = nn.Linear(4, 4).to(torch.bfloat16)
        nn.init.ones_(model.weight)
        nn.init.ones_(model.bias)
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
        if ranks.first:
            (folder / f"{stage}.json").write_text(json.dumps([gradient, *after]))
        engine.destroy()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
