"""Run by torchrun: train a single tensor of 15 elements under every ZeRO stage.

Rank 0 prints `DTYPE stage N: GROUPS BEFORE AFTER NORM`: the number of parameter groups, the loss
before and after, and the norm of the first gradient.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import nn

from tasks.process.exit_process import end_process
from tasks.training.engine.deepspeed_engine import Ranks, start_engine
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import Zero
from tasks.training.model.base import DTYPES
from tests.settings import Batch, Settings


def refuse_empty_groups() -> None:
    """Make DeepSpeed fail on empty groups, as versions did that do not drop them."""
    import deepspeed

    own = deepspeed.initialize

    def initialize(*, model_parameters: list[Any], **given: Any) -> Any:
        for group in model_parameters:
            if isinstance(group, dict) and not group["params"]:
                raise ValueError("zip() argument 2 is longer than argument 1")
        return own(model_parameters=model_parameters, **given)

    deepspeed.initialize = initialize


def main() -> None:
    """Take three steps under each stage, in 16 bits and in 32."""
    torch.set_num_threads(1)
    ranks = Ranks()
    refuse_empty_groups()
    for dtype, stage in itertools.product(("bfloat16", "float32"), range(4)):
        settings = Settings(
            dtype=dtype,
            zero=Zero(stage),
            batch=Batch(micro_batch_size=1, global_batch_size=ranks.world_size),
        )
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 1)).to(DTYPES[dtype])
        model[1].requires_grad_(False)
        engine = start_engine(model, deepspeed_config(settings, ranks.world_size), settings.optim)
        given = torch.ones(1, 3, dtype=DTYPES[dtype], device=ranks.device)
        losses, norms = [], []
        for _ in range(3):
            for group in engine.optimizer.param_groups:
                group["lr"] = 0.05
            loss = engine(given).float().square().sum()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            norms.append(float(engine.get_global_grad_norm()))
        if ranks.first:
            groups = len(engine.optimizer.param_groups)
            measured = f"{losses[0]:.4f} {losses[-1]:.4f} {norms[0]:.3f}"
            print(f"{dtype} stage {stage}: {groups} {measured}", flush=True)
        engine.destroy()
        ranks.barrier()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main()
