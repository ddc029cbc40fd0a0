"""Steps of tiny models under every ZeRO stage, for `run_jobs.py`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tasks.training.engine.deepspeed_engine import start_engine
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import Zero
from tasks.training.steps import take
from tests.settings import Batch, Optim, Settings

PASSES = 16


def measure_engines(ranks: Any, folder: Path) -> None:
    """Write `sums.json` and `single.json`: a list of measurements for each stage."""
    for name, measure in (("sums", add_up), ("single", train_single_tensor)):
        measures = [measure(ranks, stage) for stage in range(4)]
        if ranks.first:
            (folder / f"{name}.json").write_text(json.dumps(measures))


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


def train_single_tensor(ranks: Any, stage: int) -> list[float]:
    """Train 15 elements; return losses, the first norm, and 1 if a bad gradient is noticed."""
    batch = Batch(micro_batch_size=1, global_batch_size=ranks.world_size)
    settings = Settings(dtype="bfloat16", zero=Zero(stage), batch=batch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5, bias=False), nn.Linear(5, 1)).to(torch.bfloat16)
    model[1].requires_grad_(False)
    engine = start_engine(model, deepspeed_config(settings, ranks.world_size), settings.optim)
    set_lr(engine, 0.05)
    row = torch.ones(1, 3, dtype=torch.bfloat16, device=ranks.device)
    losses, norms = [], []
    for _ in range(3):
        loss = engine(row).float().square().sum()
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm()))
    loss = engine(row).float().square().sum()
    engine.backward(loss + torch.sqrt(loss * 0.0))  # finite, with a gradient that is not
    broken, _ = take(engine, half=False)
    engine.destroy()
    return [losses[0], losses[-1], norms[0], float(math.isnan(broken))]


def set_lr(engine: Any, lr: float) -> None:
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
