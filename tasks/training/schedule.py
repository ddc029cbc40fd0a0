"""Learning-rate schedules as plain functions of the step."""

from __future__ import annotations

import math

from tasks.errors import ConfigError

SCHEDULERS = ("cosine", "linear", "constant")


def warmup_steps(total: int, ratio: float) -> int:
    """Steps of linear warm-up: `ratio` of all steps, rounded up, and none for ratio 0."""
    return min(total, math.ceil(total * ratio))


def factor(kind: str, *, step: int, total: int, warmup: int) -> float:
    """What the base learning rate is multiplied with in one step.

    Args:
        kind: cosine (to zero, half a period), linear (to zero) or constant.
        step: the step about to be taken, 1 to `total`.
        total: steps of the run.
        warmup: steps of linear rise; step `warmup` is the first at the full rate.

    Raises:
        ConfigError: for a schedule of another name.
    """
    if kind not in SCHEDULERS:
        raise ConfigError(
            f"train.scheduler={kind} is not a schedule",
            hint=f"train.scheduler={'|'.join(SCHEDULERS)}",
        )
    if step <= warmup:
        return step / max(1, warmup)
    if kind == "constant":
        return 1.0
    # The last step keeps a small rate: progress reaches 1 one step after the end.
    progress = (step - warmup) / max(1, total - warmup + 1)
    if kind == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
