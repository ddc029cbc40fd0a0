"""How far the rewards of a model lie from those it gave before, and how far they may.

The scale of rewards is arbitrary, so a difference is stated in standard deviations of the
reference's own rewards over the texts: 0.03 is 3 % of how far texts lie apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean, pstdev

from tasks.core.errors import DataError, DriftError


@dataclass(frozen=True)
class RewardLimit:
    """What a profile admits.

    Attributes:
        difference: mean absolute difference, in standard deviations of the reference's scores.
        order: least share of the pairs of texts that the two order alike.
    """

    difference: float
    order: float


@dataclass(frozen=True)
class RewardDrift:
    """How far scores lie from the reference's; differences in its standard deviations.

    Attributes:
        mean_difference, max_difference: absolute, over the texts.
        same_order: share of the pairs of texts, of those the reference tells apart.
        unit: the standard deviation itself, in rewards.
    """

    mean_difference: float
    max_difference: float
    same_order: float
    unit: float

    def as_dict(self) -> dict[str, float]:
        """Plain numbers, for manifests and trackers."""
        return asdict(self)


def reward_drift(reference: Sequence[float], new: Sequence[float]) -> RewardDrift:
    """Compare scores of the same texts.

    Raises:
        DataError: the reference gives all texts the same score: there is no scale.
        DriftError: a score that is not finite.
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
    """What of `measured` is beyond `limit`; empty when it holds.

    Args:
        measured: the drift.
        limit: what is admitted.
        noise: mean absolute difference of the same model measured twice, in rewards; the mean
            difference must then also stay within twice of it.
    """
    found = []
    if measured.mean_difference > limit.difference:
        found.append(f"mean difference {measured.mean_difference:.2e} > {limit.difference:g}")
    if measured.same_order < limit.order:
        found.append(f"pairs in the same order {measured.same_order:.4f} < {limit.order:g}")
    if noise is not None and measured.mean_difference * measured.unit > 2 * noise:
        moved = measured.mean_difference * measured.unit
        found.append(f"mean difference {moved:.2e} > twice the repeat noise {noise:.2e}")
    return found
