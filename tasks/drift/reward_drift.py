"""Drift of a reward model: the difference of its rewards from those of a reference.

The scale of rewards is arbitrary, so differences are in standard deviations of the reference's
rewards over the texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev

from tasks.core.errors import DataError, DriftError


@dataclass(frozen=True)
class RewardLimit:
    """Limits of a drift profile for reward models.

    Attributes:
        difference: highest mean absolute difference, in std of the reference scores.
        order: lowest share of pairs of texts that both models rank in the same order.
    """

    difference: float
    order: float


@dataclass(frozen=True)
class RewardDrift:
    """Difference of scores from those of a reference.

    Attributes:
        mean_difference: mean absolute difference over the texts, in std of the reference scores.
        max_difference: largest absolute difference, in the same unit.
        same_order: share of pairs of texts in the same order, among the pairs that the reference
            scores differently.
        unit: standard deviation of the reference scores.
    """

    mean_difference: float
    max_difference: float
    same_order: float
    unit: float


def reward_drift(reference: Sequence[float], new: Sequence[float]) -> RewardDrift:
    """Compare two models' scores of the same texts.

    Raises:
        DataError: the reference gives all texts the same score, which has no scale.
        DriftError: a score is not finite.
    """
    if not all(map(math.isfinite, (*reference, *new))):
        raise DriftError("rewards that are NaN or infinite")
    unit = pstdev(reference)
    if unit == 0:
        raise DataError(
            f"the reference gives all {len(reference)} texts the same reward",
            hint="smoke.texts=<file with several different texts>, or smoke.engine=none",
        )
    differences = [abs(a - b) / unit for a, b in zip(reference, new, strict=True)]
    pairs = [(a, b) for a, b in combinations(zip(reference, new, strict=True), 2) if a[0] != b[0]]
    alike = [(a[0] < b[0]) == (a[1] < b[1]) and a[1] != b[1] for a, b in pairs]
    return RewardDrift(fmean(differences), max(differences), fmean(alike), unit)


def exceeds(measured: RewardDrift, limit: RewardLimit, noise: float | None = None) -> list[str]:
    """Return one text for each limit that a drift exceeds; empty if it is within all limits.

    Args:
        measured: the drift.
        limit: its limits.
        noise: repeat noise of the engine in scores; the mean difference must then stay within
            twice of it.
    """
    exceeded = []
    if measured.mean_difference > limit.difference:
        exceeded.append(f"mean difference {measured.mean_difference:.2e} > {limit.difference:g}")
    if measured.same_order < limit.order:
        exceeded.append(f"pairs in the same order {measured.same_order:.4f} < {limit.order:g}")
    if noise is not None and measured.mean_difference * measured.unit > 2 * noise:
        moved = measured.mean_difference * measured.unit
        exceeded.append(f"mean difference {moved:.2e} > twice the repeat noise {noise:.2e}")
    return exceeded
