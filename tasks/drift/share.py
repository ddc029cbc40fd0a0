"""Estimate the share of an adapter that answers: 0 is the base, 1 the trained model.

Scaling an adapter by a shifts each logit by about a times its change in training. So, at every
position, log p_served - log p_base is regressed on log p_trained - log p_base over the ids,
weighted by probability. Both differences are centred per position, which removes the normalisation.
Noise of the engine is independent of the adapter's direction, so the share is found where the KL of
base and trained model is far below the KL of that noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.drift.fingerprint import Fingerprint, contexts

NORMAL = 2.576
"""Half of the interval's width in standard errors, of a normal variable: 99 %."""
TOLERANCE = 0.1
"""A share this close to 1 is no fault: engines round the product of two matrices differently."""
WIDEST = 0.25
"""Half of an interval's width above which nothing can be said: 0.5 could be 1."""
FEWEST_PROBES = 4
LEAN = 0.25
"""Bias of a share by the noise of a format, in units of the ratio of noise and adapter."""
STEADY = 4.0
"""Effect of an adapter of a mixture of experts at a position, in medians, above which it chose
other experts there: near a tie of the router, rounding alone chooses the base's again."""


@dataclass(frozen=True)
class Share:
    """Estimated share of an adapter, with an interval by its spread over probes."""

    value: float  # 0 for the base, 1 for the trained model, 0.5 for half of its scale
    low: float
    high: float
    # share of the adapter's effect that the line does not explain; 0 for the base, any scaled
    # adapter and the trained model
    remainder: float
    signal: float  # size of the adapter's effect at the returned ids, half its variance (nats)

    @property
    def is_whole(self) -> bool:
        """True if the interval, or the tolerance around 1, holds 1."""
        return self.low <= 1 <= self.high or abs(self.value - 1) <= TOLERANCE

    @property
    def half_width(self) -> float:
        """Half of the interval's width."""
        return (self.high - self.low) / 2

    @property
    def is_certain(self) -> bool:
        """True if the interval is narrow enough to tell a whole adapter from half of it."""
        return self.half_width <= WIDEST

    @property
    def text(self) -> str:
        """The estimate for a person."""
        return f"{self.value:z.2f} ({self.low:z.2f} to {self.high:z.2f})"


def tolerance(share: Share, trained: Fingerprint, dtype: str) -> float:
    """Return how far from 1 the share of a right model may be that is computed in a dtype.

    The noise of a format leans towards the adapter's direction: measured on a real model, by up
    to a quarter of their ratio (as standard deviations).
    """
    least = WIDEST if trained.routed else TOLERANCE  # routers tie
    return max(least, LEAN * math.sqrt(noise_of(trained, dtype) / share.signal))


def noise_of(trained: Fingerprint, dtype: str) -> float:
    """Return the noise of a format for a model (nats); 0 if it was not measured."""
    noise = trained.formats.get(dtype)
    return noise.typical_kl(routed=trained.routed) if noise else 0.0


def adapter_share(
    trained: Fingerprint, base: Fingerprint, served: NDArray[Any], measured: NDArray[np.bool_]
) -> Share | None:
    """Return the share of the adapter in the log-probabilities `served` of an engine, (N, K).

    They are NaN where it returned none; `measured` (N,) is True at the positions that it answered.
    None if too few probes were measured, or the adapter has no effect.
    """
    p = (np.exp(trained.logprobs.astype(np.float64)) + np.exp(base.logprobs)) / 2
    # Probes that begin alike repeat the same noise.
    fresh: NDArray[Any] = np.zeros(len(trained.logprobs), bool)
    fresh[np.unique(contexts(trained.probes), return_index=True)[1]] = True
    weights = np.where(np.isnan(served) | ~fresh[:, None], 0.0, p)
    measured = measured & fresh
    moved = _centred(trained.logprobs, base.logprobs, weights)
    seen = _centred(served, base.logprobs, weights)
    products = np.stack(
        [(weights * a * b).sum(1) for a, b in ((moved, moved), (moved, seen), (seen, seen))], 1
    )
    owner: NDArray[Any] = np.repeat(
        np.arange(len(trained.probes)), [len(probe) - 1 for probe in trained.probes]
    )
    if trained.routed and measured.any():
        measured &= products[:, 0] <= STEADY * np.median(products[measured, 0])
        products[~measured] = 0.0
    sums = np.zeros((len(trained.probes), 3))
    np.add.at(sums, owner, products)
    sums = sums[np.bincount(owner, weights=measured, minlength=len(sums)) > 0]
    square, product, other = sums.sum(0)
    signal = float(square / 2 / max(measured.sum(), 1))
    if len(sums) < FEWEST_PROBES or signal <= 1e-9:
        return None
    value = product / square
    # By the ratio's standard error over probes; Student's t of so few is wider than the normal.
    count = len(sums)
    error = float(np.sqrt(((sums[:, 1] - value * sums[:, 0]) ** 2).sum()) / square)
    half = NORMAL * np.sqrt(count / (count - 1)) * (1 + 2.4 / (count - 1)) * error
    remainder = max(0.0, other - 2 * value * product + value**2 * square) / square
    low, high = float(value - half), float(value + half)
    return Share(float(value), low, high, float(remainder), signal)


def _centred(above: NDArray[Any], below: NDArray[Any], weights: NDArray[Any]) -> NDArray[Any]:
    """Return the difference of two log-probabilities less its weighted mean by position."""
    difference = np.where(weights > 0, np.nan_to_num(above.astype(np.float64)) - below, 0.0)
    mass = np.maximum(weights.sum(1, keepdims=True), 1e-300)
    centred: NDArray[Any] = difference - (weights * difference).sum(1, keepdims=True) / mass
    return centred
