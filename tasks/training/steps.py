"""Parts of an optimizer step, for training on data and online RL.

A step depends on weights, optimizer state, seed and step number alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import numpy as np
import torch

from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import Optim
from tasks.training.losses import Loss
from tasks.training.passes import add_up

Row = TypeVar("Row")
"""A row as `loss_of` takes it."""


def accumulate(
    engine: Any, ranks: Ranks, rows: Sequence[Row], loss_of: Callable[[Row], Loss]
) -> tuple[dict[str, float], list[float]]:
    """Run forward and backward of this rank's rows of a step. The caller calls `engine.step()`.

    Every rank has the same number of `rows`; `loss_of` returns a row's part of the loss of the
    whole step.

    Returns:
        `loss` and the metrics of the objective, summed over all rows and ranks; and the loss of
        each row of this rank.
    """
    # DeepSpeed divides by accumulation steps and averages over ranks; the loss already is a part of
    # the whole step's. Ranks that share a row have its whole loss, and each the gradient of its own
    # tokens.
    undo = len(rows) * ranks.world_size
    measured: list[dict[str, torch.Tensor]] = []
    for row in rows:
        if measured:
            engine.step()  # counts the row before; changes no weight
        loss = loss_of(row)
        engine.backward(loss.value * undo)
        measured.append({"loss": loss.value.detach(), **loss.measures})
    return add_up(ranks, measured, counted=ranks.leads), [float(row["loss"]) for row in measured]


def take(engine: Any, *, half: bool) -> tuple[float, bool]:
    """Let DeepSpeed update the weights; return the gradient's norm before clipping.

    The second result is True if fp16 overflowed and no weight changed. The norm is NaN if the
    gradient is not finite; DeepSpeed reports -1 or has skipped the step.
    """
    engine.step()
    skipped = not engine.was_step_applied()
    norm = float(engine.get_global_grad_norm() or 0.0)
    if half and skipped:
        return norm, True
    return (math.nan if skipped or not 0 <= norm < math.inf else norm), False


def set_lr(engine: Any, optim: Optim, *, step: int, steps: int) -> float:
    """Set the optimizer's learning rate for step `step` of `steps`, and return it."""
    lr = optim.lr * float(schedule(optim, steps)(step))
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    return lr


def begin_random(seed: int, *, step: int, rank: int) -> None:
    """Seed torch, numpy and `random` from seed, step and rank.

    The dropout of a step then does not depend on the steps before it, and a resumed run needs no
    generator states.
    """
    seeds = np.random.SeedSequence([seed, step, rank]).generate_state(3)
    torch.manual_seed(int(seeds[0]))
    np.random.seed(int(seeds[1]))
    random.seed(int(seeds[2]))


@lru_cache
def schedule(optim: Optim, total: int) -> Callable[[int], float]:
    """Return the learning rate of a step over the peak rate, by transformers' own schedules.

    Step s of n gets the rate that `transformers.get_scheduler` gives at step s of n + 1. There a
    run begins with a step at rate 0; here it begins one step later, so that no step is wasted.
    """
    from transformers import get_scheduler

    warmup = min(total, math.ceil(total * optim.warmup_ratio))
    decay = math.ceil(total * optim.decay_ratio)
    options: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr_rate": optim.min_lr_ratio},
        "cosine_with_restarts": {"num_cycles": optim.num_cycles},
        # transformers refuses a last rate that is not below the peak.
        "polynomial": {
            "lr_end": min(optim.min_lr_ratio, math.nextafter(1.0, 0.0)),
            "power": optim.power,
        },
        # A decay that reaches into the warm-up begins after it, from the peak.
        "warmup_stable_decay": {
            "num_stable_steps": max(0, total + 1 - decay - warmup),
            "num_decay_steps": decay,
            "min_lr_ratio": optim.min_lr_ratio,
        },
    }
    made = get_scheduler(
        optim.scheduler,
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=warmup,
        num_training_steps=None if optim.scheduler == "warmup_stable_decay" else total + 1,
        scheduler_specific_kwargs=options.get(optim.scheduler),
    )
    rate: Callable[[int], float] = made.lr_lambdas[0]
    return rate
