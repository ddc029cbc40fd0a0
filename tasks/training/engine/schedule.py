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
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, get_args

from tasks.config.choices import Scheduler
from tasks.core.errors import ConfigError

SCHEDULERS: tuple[str, ...] = get_args(Scheduler)
"""Names of the schedules."""
_BELOW_ONE = math.nextafter(1.0, 0.0)
"""Largest last rate of `polynomial`: transformers refuses one that is not below the peak."""


@dataclass(frozen=True)
class Shape:
    """Options of the schedules; each is read by the schedules named with it.

    Attributes:
        min_ratio: last rate over peak rate; cosine_with_min_lr, polynomial, warmup_stable_decay.
        decay_ratio: share of the steps in which the rate falls; warmup_stable_decay.
        power: exponent of the remaining share of the steps; polynomial.
        cycles: number of falls from the peak, all equally long; cosine_with_restarts.
    """

    min_ratio: float = 0.0
    decay_ratio: float = 0.1
    power: float = 1.0
    cycles: int = 1


def warmup_steps(total: int, ratio: float) -> int:
    """Return the steps of linear warm-up: `ratio` of all steps, rounded up; 0 for ratio 0."""
    return min(total, math.ceil(total * ratio))


def factor(kind: str, *, step: int, total: int, warmup: int, shape: Shape | None = None) -> float:
    """Return the learning rate of one step over the peak rate.

    Args:
        kind: one of `SCHEDULERS`.
        step: the step about to be taken, 1 to `total`.
        total: steps of the run.
        warmup: steps of linear warm-up; step `warmup` is the first at the peak rate. `constant`
            has no warm-up.
        shape: options; None for the defaults.

    Raises:
        ConfigError: unknown schedule.
    """
    if kind not in SCHEDULERS:
        raise ConfigError(
            f"train.scheduler={kind} is not a schedule",
            hint=f"train.scheduler={'|'.join(SCHEDULERS)}",
        )
    return float(_schedule(kind, total, warmup, shape or Shape())(step))


@lru_cache
def _schedule(kind: str, total: int, warmup: int, shape: Shape) -> Callable[[int], float]:
    """Build transformers' schedule around a throw-away optimizer, and return its function."""
    import torch
    from transformers import get_scheduler

    decay = math.ceil(total * shape.decay_ratio)
    options: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr_rate": shape.min_ratio},
        "cosine_with_restarts": {"num_cycles": shape.cycles},
        "polynomial": {"lr_end": min(shape.min_ratio, _BELOW_ONE), "power": shape.power},
        # A decay that reaches into the warm-up begins after it, from the peak.
        "warmup_stable_decay": {
            "num_stable_steps": max(0, total + 1 - decay - warmup),
            "num_decay_steps": decay,
            "min_lr_ratio": shape.min_ratio,
        },
    }
    made = get_scheduler(
        kind,
        torch.optim.SGD([torch.zeros(1)], lr=1.0),
        num_warmup_steps=warmup,
        num_training_steps=None if kind == "warmup_stable_decay" else total + 1,
        scheduler_specific_kwargs=options.get(kind),
    )
    rate: Callable[[int], float] = made.lr_lambdas[0]
    return rate
