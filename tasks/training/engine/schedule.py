"""Learning-rate schedules: transformers' own, as plain functions of the step.

Step s of n gets the rate that `transformers.get_scheduler` gives at step s of n + 1. There a run
begins with a step at rate 0; here it begins one step later, so that no step is wasted.

Three names of transformers are left out. `reduce_lr_on_plateau` and `greedy` follow the measured
loss, so that a resumed run would need more than its step. `cosine_warmup_with_min_lr` is
`cosine_with_min_lr` with another warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, get_args

from tasks.config.choices import Scheduler
from tasks.config.learning import Optim

SCHEDULERS: tuple[str, ...] = get_args(Scheduler)
"""Names of the schedules."""
_BELOW_ONE = math.nextafter(1.0, 0.0)
"""Largest last rate of `polynomial`: transformers refuses one that is not below the peak."""


def warmup_steps(total: int, ratio: float) -> int:
    """Return the steps of linear warm-up: `ratio` of all steps, rounded up; 0 for ratio 0."""
    return min(total, math.ceil(total * ratio))


def factor(optim: Optim, *, step: int, total: int) -> float:
    """Return the learning rate of one step over the peak rate.

    Args:
        optim: the schedule (one of `SCHEDULERS`), its warm-up and its options.
        step: the step about to be taken, 1 to `total`.
        total: steps of the run.
    """
    return float(_schedule(optim, total)(step))


@lru_cache
def _schedule(optim: Optim, total: int) -> Callable[[int], float]:
    """Build transformers' schedule around a throw-away optimizer, and return its function."""
    import torch
    from transformers import get_scheduler

    warmup, decay = warmup_steps(total, optim.warmup_ratio), math.ceil(total * optim.decay_ratio)
    options: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr_rate": optim.min_lr_ratio},
        "cosine_with_restarts": {"num_cycles": optim.num_cycles},
        "polynomial": {"lr_end": min(optim.min_lr_ratio, _BELOW_ONE), "power": optim.power},
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
