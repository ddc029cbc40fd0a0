"""Compare the means of two sets of results with a bootstrap interval.

Method: the percentile interval of Efron & Tibshirani (1993), "An Introduction to the Bootstrap",
chapter 13. If both models answered the same rows, whole rows are resampled (paired): a row that is
hard for both models then adds no noise. Otherwise each set is resampled by itself (two samples,
chapter 8). The seed is fixed, so the same results give the same interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000
SEED = 20_261_124
LEVEL = 0.95
_AT_ONCE = 4_000_000
"""Most random indices in memory at once."""


@dataclass(frozen=True)
class Interval:
    """Difference of two means with its bootstrap interval.

    Attributes:
        value: mean of the second set minus mean of the first.
        low: lower end of the 95 % interval.
        high: upper end.
    """

    value: float
    low: float
    high: float

    @property
    def is_significant(self) -> bool:
        """True if the interval leaves out zero."""
        return self.low > 0 or self.high < 0


def paired(
    first: Sequence[float], second: Sequence[float], *, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """Return the difference of the means over the same rows.

    Args:
        first: results of the first model, one per row.
        second: results of the second model on the same rows, in the same order.
        resamples: number of bootstrap samples.
        seed: seed of the generator.

    Raises:
        ValueError: there are no rows, or not as many in both.
    """
    differences = np.array([b - a for a, b in zip(first, second, strict=True)], dtype=float)
    means = _means(differences, resamples, np.random.default_rng(seed))
    return _interval(float(differences.mean()), means)


def unpaired(
    first: Sequence[float], second: Sequence[float], *, resamples: int = RESAMPLES, seed: int = SEED
) -> Interval:
    """Return the difference of the means of two independent sets of rows.

    Args:
        first: results of the first model, one per row.
        second: results of the second model on other rows.
        resamples: number of bootstrap samples.
        seed: seed of the generator.

    Raises:
        ValueError: one of the sets is empty.
    """
    a, b = np.array(first, dtype=float), np.array(second, dtype=float)
    generator = np.random.default_rng(seed)
    means = _means(b, resamples, generator) - _means(a, resamples, generator)
    return _interval(float(b.mean() - a.mean()), means)


def _means(values: np.ndarray, resamples: int, generator: np.random.Generator) -> np.ndarray:
    """Return the means of bootstrap samples, shape [resamples]."""
    count = len(values)
    if not count:
        raise ValueError("no results to compare")
    block = max(_AT_ONCE // count, 1)
    sizes = [min(block, resamples - done) for done in range(0, resamples, block)]
    return np.concatenate(
        [values[generator.integers(count, size=(size, count))].mean(axis=1) for size in sizes]
    )


def _interval(value: float, means: np.ndarray) -> Interval:
    low, high = (float(np.quantile(means, (1 + side * LEVEL) / 2)) for side in (-1, 1))
    return Interval(value, low, high)
