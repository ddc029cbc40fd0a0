"""Say what a comparison would have seen: detection probability by size of a fault.

A fault that changes the log-probabilities of all tokens by independent errors of variance s^2 makes
half of their weighted variance the KL of a position: a quadratic form of the errors with the
matrix diag(p) - p p^T, whose mean and variance are s^2 and s^4 times traces. Faults do not hit all
texts alike; each probe's variance is scaled by a random factor with mean 1 and the coefficient of
variation `UNEVEN`. The mean KL that the server's few ids show is close to normal.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.drift.fingerprint import DriftLimit, Fingerprint
from tasks.verify.alignment import Aligned

SURE = 0.99
UNEVEN = 0.5


@dataclass(frozen=True)
class Power:
    """Detection probability of one comparison.

    Attributes:
        limit: limit of the mean KL (nats).
        share: mean KL at the returned ids, as a share of that over the whole vocabulary.
        spread: standard deviation of the measured mean KL, in units of the fault's size.
    """

    limit: float
    share: float
    spread: float

    def detection(self, size: float) -> float:
        """Return the probability that a fault is seen.

        Args:
            size: its mean KL over the whole vocabulary, in nats per token.
        """
        if size <= 0 or self.spread <= 0:
            return float(size * self.share > self.limit)
        return NormalDist().cdf((size * self.share - self.limit) / (size * self.spread))

    @property
    def smallest(self) -> float:
        """Size of the fault that is seen with probability `SURE` (nats); infinite if none is."""
        sure = self.share - NormalDist().inv_cdf(SURE) * self.spread
        return self.limit / sure if sure > 0 else float("inf")

    @property
    def text(self) -> str:
        """The smallest fault for a person."""
        if self.smallest == float("inf"):
            return "too few positions to say which shift would have been seen"
        return (
            f"a mean shift of {self.smallest:.2g} nats per token would have been seen with "
            f"{SURE:.0%}"
        )


def power(reference: Fingerprint, served: Aligned, limit: DriftLimit) -> Power:
    """Return what a comparison at these positions and ids would have seen.

    Args:
        reference: fingerprint of the trained model.
        served: the server's answers; only their ids matter.
        limit: limits of the comparison.
    """
    measured = served.measured
    p = np.exp(reference.logprobs.astype(np.float64))[measured]
    shared = ~np.isnan(served.logprobs[measured])
    whole = (p * (1 - p)).sum(1)
    errors, squares = _traces(np.where(shared, p, 0.0), np.where(shared, 0.0, p))
    total = whole.sum()
    if total <= 0:
        return Power(limit.mean_kl, 0.0, 0.0)
    sizes = [len(probe) - 1 for probe in reference.probes]
    owner: NDArray[Any] = np.repeat(np.arange(len(sizes)), sizes)[measured]
    by_probe = np.bincount(owner, weights=errors)
    # Variance of the sum of x^T M x / 2 with x of variance s^2, in units of s^4.
    variance = (1 + UNEVEN**2) * squares.sum() / 2 + UNEVEN**2 * (by_probe**2).sum() / 4
    return Power(limit.mean_kl, float(errors.sum() / total), float(2 * np.sqrt(variance) / total))


def _traces(shared: NDArray[Any], others: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the traces of M and M^2 by position, of the returned ids and the rest as one id.

    The error of the rest is the weighted mean of its ids' errors, so its variance is smaller.

    Args:
        shared: probabilities of the returned ids, 0 elsewhere, shape (N, K).
        others: probabilities of the other ids, shape (N, K).
    """
    rest = np.maximum(1 - shared.sum(1), 0.0)
    scale = (others**2).sum(1) / np.maximum(rest, 1e-150) ** 2
    p = np.concatenate([shared, rest[:, None]], 1)
    d = np.concatenate([np.ones_like(shared), np.minimum(scale, 1.0)[:, None]], 1)
    first = (d * p * (1 - p)).sum(1)
    second = (d * p * (1 - p)) ** 2
    crossed = (d * p**2).sum(1) ** 2 - (d**2 * p**4).sum(1)
    return first, second.sum(1) + crossed
