"""Steps of tiny models under every ZeRO stage, for `run_jobs.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.training.engine.deepspeed_engine import start_engine
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import Zero
from tests.settings import Batch, Optim, Settings

PASSES = 16


def measure_engines(ranks: Any, folder: Path) -> None:
    """Write `sums.json`: a list of measurements for each stage."""
    measures = [add_up(ranks, stage) for stage in range(4)]
    if ranks.first:
        (folder / "sums.json").write_text(json.dumps(measures))


def add_up(ranks: Any, stage: int) -> list[float]:
    """Return an accumulated gradient, and weight and bias after a step of weight decay alone.

    The gradient is 256 in the first micro-batch and 0.5 in the others, which bf16 cannot add to it.
    """
    import deepspeed
    from deepspeed.utils import safe_get_full_grad

    batch = Batch(micro_batch_size=1, global_batch_size=PASSES * ranks.world_size)
    optim = Optim(lr=0.0, weight_decay=0.5, max_grad_norm=0.0)
    settings = Settings(dtype="bfloat16", zero=Zero(stage), batch=batch, optim=optim)
    model = nn.Linear(4, 4).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    engine: Any = start_engine(model, deepspeed_config(settings, ranks.world_size), optim)
    for lr, sizes in ((0.5, [0.0] * PASSES), (0.0, [256.0] + [0.5] * (PASSES - 1))):
        set_lr(engine, lr)
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


def set_lr(engine: Any, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
