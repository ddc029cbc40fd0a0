"""Learning-rate schedules as plain functions of the step, by transformers' names.

At step s of n this is what `transformers.get_scheduler` gives at its step s of n + 1: there a run
begins with a step at rate 0 and here with the one after it, so that no step is wasted.

Of transformers' names three are not here: `reduce_lr_on_plateau` and `greedy` follow the measured
loss, so that a rate would depend on more than the step and a resumed run on more than its weights;
`cosine_warmup_with_min_lr` is `cosine_with_min_lr` with a rise that begins elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tasks.core.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """Knobs of the schedules. Each matters to those that are named with it.

    Attributes:
        min_ratio: last rate over peak; cosine_with_min_lr, polynomial, warmup_stable_decay.
        decay_ratio: share of the steps that the rate falls in; warmup_stable_decay.
        power: of the remaining share of the steps; polynomial.
        cycles: falls from the peak, each of as many steps; cosine_with_restarts.
    """

    min_ratio: float = 0.0
    decay_ratio: float = 0.1
    power: float = 1.0
    cycles: int = 1


@dataclass(frozen=True)
class _Place:
    """Where a step is: `step` of `total`, after `warmup` steps of rise; `last` is total + 1."""

    step: int
    total: int
    warmup: int
    shape: Shape

    @property
    def progress(self) -> float:
        """0 at the end of the warm-up, 1 one step after the last."""
        return (self.step - self.warmup) / max(1, self.total + 1 - self.warmup)


def warmup_steps(total: int, ratio: float) -> int:
    """Steps of linear warm-up: `ratio` of all steps, rounded up, and none for ratio 0."""
    return min(total, math.ceil(total * ratio))


def factor(kind: str, *, step: int, total: int, warmup: int, shape: Shape | None = None) -> float:
    """What the peak rate is multiplied with in one step.

    Args:
        kind: one of `SCHEDULERS`.
        step: the step about to be taken, 1 to `total`.
        total: steps of the run.
        warmup: steps of linear rise; step `warmup` is the first at the full rate. `constant` has
            none.
        shape: knobs; None takes the defaults.

    Raises:
        ConfigError: for a schedule of another name.
    """
    if kind not in _FALLS:
        raise ConfigError(
            f"train.scheduler={kind} is not a schedule",
            hint=f"train.scheduler={'|'.join(SCHEDULERS)}",
        )
    at = _Place(step, total, warmup, shape or Shape())
    if kind != "constant" and step <= warmup:
        # transformers lets this one alone rise from the rate that it falls to
        low = at.shape.min_ratio if kind == "warmup_stable_decay" else 0.0
        return _between(low, step / max(1, warmup))
    return _FALLS[kind](at)


def _cosine(at: _Place) -> float:
    return _half_wave(at.progress)


def _cosine_with_min_lr(at: _Place) -> float:
    return _between(at.shape.min_ratio, _half_wave(at.progress))


def _cosine_with_restarts(at: _Place) -> float:
    # Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5, all cycles of one length.
    return _half_wave(at.shape.cycles * at.progress % 1.0)


def _linear(at: _Place) -> float:
    return 1.0 - at.progress


def _polynomial(at: _Place) -> float:
    return _between(at.shape.min_ratio, (1.0 - at.progress) ** at.shape.power)


def _inverse_sqrt(at: _Place) -> float:
    # Vaswani et al. 2017, arXiv:1706.03762, eq. 3, with the warm-up as the scale of time; without
    # one 10,000 steps are, as in transformers.
    scale = at.warmup or 10_000
    return 1.0 / math.sqrt((at.step + scale - at.warmup) / scale)


def _warmup_stable_decay(at: _Place) -> float:
    # Hu et al. 2024, arXiv:2404.06395, section 4.2; falls as half a cosine.
    decay = math.ceil(at.total * at.shape.decay_ratio)
    begin = max(at.warmup, at.total + 1 - decay)
    if at.step < begin:
        return 1.0
    return _between(at.shape.min_ratio, _half_wave((at.step - begin) / max(1, decay)))


def _constant(at: _Place) -> float:
    return 1.0


def _half_wave(progress: float) -> float:
    """Half a cosine, from 1 to 0."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


def _between(low: float, share: float) -> float:
    return low + (1.0 - low) * share


_FALLS: dict[str, Callable[[_Place], float]] = {
    "cosine": _cosine,
    "cosine_with_min_lr": _cosine_with_min_lr,
    "cosine_with_restarts": _cosine_with_restarts,
    "linear": _linear,
    "polynomial": _polynomial,
    "inverse_sqrt": _inverse_sqrt,
    "warmup_stable_decay": _warmup_stable_decay,
    "constant_with_warmup": _constant,
    "constant": _constant,
}
SCHEDULERS = tuple(_FALLS)
"""Names of the schedules."""
