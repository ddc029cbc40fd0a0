"""Distance of a server's log-probabilities from a fingerprint.

A server returns few ids per position (its most likely ones and the sequence's own next token), a
fingerprint has up to 512. Both distributions are compared on the coarser partition that both sides
know, so that the KL is a lower bound of the true one (data processing inequality):

- each id that both have;
- the ids that only the fingerprint has and that the server's list rules out, as one group. A list
  of most likely ids bounds all others: none is more likely than the last one of the list;
- the ids that only the server has, as one group, by the same rule;
- everything else.

The masses of the two groups are known on one side and bounded on the other. The KL is the smallest
one that the bounds allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.drift.fingerprint import TIE_STEPS, DriftLimit, Fingerprint, steps_in
from tasks.verify.alignment import Aligned

FEWEST = 10
"""Positions below which nothing is said about a server."""
_TINY = 1e-6
"""Mass below which the rest of a distribution is rounding of the numbers in JSON."""
_BF16_OF_FP32 = 2.0**16
_ON_GRID = 0.9
"""Share of differences that are multiples of a format's steps, if logits have that format."""
_JSON = 2e-5
"""Rounding of two log-probabilities in float32 (nats)."""
_FINE = 2.0**-14
"""A rounding step below this is of 32-bit logits."""


@dataclass(frozen=True)
class Distance:
    """Distance of a server from a fingerprint.

    Attributes:
        mean_kl: mean over positions of a lower bound of KL(reference || server), in nats.
        p95_kl: its 95th percentile.
        max_kl: its maximum.
        top1_agreement: share of distinct contexts in which the top tokens agree, ties included; NaN
            if the server returned no alternatives.
        kl: by position, shape (N,); NaN where nothing was measured.
        first_kl: mean over the first positions of all probes, where no token looks back.
        growth: mean over the last third of each probe, divided by that over its first third.
    """

    mean_kl: float
    p95_kl: float
    max_kl: float
    top1_agreement: float
    kl: NDArray[Any]
    first_kl: float
    growth: float

    @property
    def positions(self) -> int:
        """Number of measured positions."""
        return int((~np.isnan(self.kl)).sum())

    def exceeds(self, limit: DriftLimit) -> bool:
        """Return True if a limit is exceeded."""
        known = self.kl[~np.isnan(self.kl)]
        kl = float(np.median(known)) if limit.by_median else self.mean_kl
        return (
            kl > limit.mean_kl
            or self.p95_kl > limit.p95_kl
            or self.top1_agreement < limit.top1_agreement
        )


def coarse_kl(reference: Fingerprint, served: Aligned, *, most_likely: bool = True) -> NDArray[Any]:
    """Return a lower bound of KL(reference || server) by position (nats), shape (N,).

    Args:
        reference: the fingerprint.
        served: the server's answers.
        most_likely: True if the fingerprint's ids are its own most likely ones, which bounds all
            others; False for a base at the ids of the trained model.
    """
    p = np.exp(reference.logprobs.astype(np.float64))
    shared = ~np.isnan(served.logprobs)
    q = np.exp(np.where(shared, served.logprobs, -np.inf))
    kl = _term(np.where(shared, p, 0.0), np.where(shared, q, 1.0)).sum(1)
    # `p_group` is known and `q_group` bounded for ids of the fingerprint alone; for ids of the
    # server alone, it is the other way round.
    p_left = np.maximum(1 - np.where(shared, p, 0.0).sum(1), 0.0)
    q_left = np.maximum(1 - q.sum(1), _TINY)
    excluded = ~shared & (reference.logprobs > served.floor[:, None])
    p_group = np.minimum(np.where(excluded, p, 0.0).sum(1), p_left)
    p_left = p_left - p_group
    q_extra = np.minimum(served.extra_mass, q_left - _TINY / 2)
    q_left = q_left - q_extra
    q_most = np.minimum(excluded.sum(1) * np.exp(served.floor), q_left)
    p_most = p_left
    if most_likely:
        p_most = np.minimum(served.extra_count * np.exp(_floor(reference)), p_left)
    rest = _smallest(p_group, p_left, q_extra, q_left, p_most, q_most)
    kl = np.maximum(kl + rest, 0.0)
    return np.where(served.measured, kl, np.nan)


def _smallest(
    p_group: NDArray[Any],
    p_left: NDArray[Any],
    q_extra: NDArray[Any],
    q_left: NDArray[Any],
    p_most: NDArray[Any],
    q_most: NDArray[Any],
) -> NDArray[Any]:
    """Return the least KL of (p_group, x, p_left - x) from (y, q_extra, q_left - y).

    It is jointly convex in x <= p_most and y <= q_most, so the minimum is the best of the feasible
    points at which each variable is free or at its bound.
    """
    p_all, q_all = p_group + p_left, q_left + q_extra
    with np.errstate(divide="ignore", invalid="ignore"):
        free = (p_all * q_extra / q_all, np.where(p_all > 0, q_all * p_group / p_all, 0.0))
        y_at = (q_left * p_group) / (p_group + p_left - p_most)
        x_at = p_left * q_extra / (q_left + q_extra - q_most)
    candidates = [free, (p_most, y_at), (x_at, q_most), (p_most, q_most)]
    best = np.full_like(p_left, np.inf)
    for x, y in candidates:
        x, y = np.nan_to_num(x), np.nan_to_num(y)
        feasible = (x <= p_most + 1e-15) & (y <= q_most + 1e-15)
        x, y = np.minimum(x, p_most), np.minimum(y, q_most)
        kl = _term(p_group, y) + _term(x, q_extra) + _term(p_left - x, q_left - y)
        best = np.where(feasible & (kl < best), kl, best)
    return best


def _term(p: NDArray[Any], q: NDArray[Any]) -> NDArray[Any]:
    """Return p log(p / q); 0 where p is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        term: NDArray[Any] = np.where(p > 0, p * (np.log(p) - np.log(np.maximum(q, 1e-300))), 0.0)
    return term


def _floor(reference: Fingerprint) -> NDArray[Any]:
    """Return the log-probability that no id outside of a fingerprint exceeds, shape (N,)."""
    following = np.array([token for probe in reference.probes for token in probe[1:]])
    listed = np.where(reference.ids == following[:, None], np.inf, reference.logprobs)
    floor: NDArray[Any] = np.minimum(listed.min(1), 0.0).astype(np.float64)
    return floor


def distance(
    reference: Fingerprint, served: Aligned, limit: DriftLimit, *, most_likely: bool = True
) -> Distance:
    """Return the distance of a server from a fingerprint.

    Args:
        reference: the fingerprint.
        served: the server's answers.
        limit: limits; tokens that noise within them may swap are a tie.
        most_likely: as in `coarse_kl`.

    Raises:
        ValueError: no position was measured.
    """
    kl = coarse_kl(reference, served, most_likely=most_likely)
    known = kl[served.measured]
    if not len(known):
        raise ValueError("no position was measured")
    place, length = _places(reference)
    early, late = place < length / 3, place >= 2 * length / 3
    first, last = _mean(kl[early]), _mean(kl[late])
    return Distance(
        mean_kl=float(known.mean()),
        p95_kl=float(np.quantile(known, 0.95)),
        max_kl=float(known.max()),
        top1_agreement=_agreement(reference, served, limit),
        kl=kl,
        first_kl=_mean(kl[place == 0]),
        growth=last / max(first, 1e-12),
    )


def format_of(reference: Fingerprint, served: Aligned) -> str | None:
    """Return the torch name of the dtype in which a server computes its logits, by its answers.

    Two log-probabilities of one position differ as their logits do: by a multiple of a quarter of
    the step at the largest logit, for most ids of a list. "float32" if no 16-bit format has such
    steps; None if the reference does not tell the size of the logits.
    """
    if reference.steps is None or not served.measured.any():
        return None
    values = np.where(np.exp(served.logprobs) > 0, served.logprobs, np.nan).astype(np.float64)
    behind = np.nanmax(np.where(served.measured[:, None], values, 0.0), 1, keepdims=True) - values
    for dtype in ("bfloat16", "float16"):
        steps = steps_in(reference, dtype)
        assert steps is not None
        unit = np.broadcast_to(steps[:, None] / 4, behind.shape)
        told = (behind > _JSON) & (unit > 16 * _JSON)
        if not told.any():
            return None
        off = np.abs(behind - unit * np.round(behind / unit))[told]
        if (off < _JSON).mean() > _ON_GRID:
            return dtype
    return "float32"


def _steps(reference: Fingerprint) -> NDArray[Any] | None:
    """Return the steps of bf16 at the largest logits, shape (N,); None if they are unknown."""
    if reference.steps is None:
        return None
    steps = reference.steps.astype(np.float64)
    return np.where(steps < _FINE, steps * _BF16_OF_FP32, steps)


def _agreement(reference: Fingerprint, served: Aligned, limit: DriftLimit) -> float:
    """Return the share of distinct contexts in which the top tokens agree; NaN if none is known.

    Ties are tokens within two rounding steps of bf16, or closer than two standard deviations of the
    difference of two tokens under noise that the limit allows: KL = variance / 2.
    """
    best = reference.logprobs.max(1)
    at_id = np.where(reference.ids == served.top1[:, None], reference.logprobs, -np.inf).max(1)
    tie = np.full(len(best), 2 * np.sqrt(2) * np.sqrt(2 * limit.mean_kl))
    if (steps := _steps(reference)) is not None:
        tie = np.maximum(tie, TIE_STEPS * steps)
    agree = (best - at_id < tie) | (served.top1 == reference.top1)
    known = served.top1 >= 0
    if not known.any():
        return float("nan")
    numbers: dict[tuple[int, ...], int] = {}
    contexts = np.array(
        [
            numbers.setdefault(tuple(probe[:end]), len(numbers))
            for probe in reference.probes
            for end in range(1, len(probe))
        ]
    )[known]
    count = np.bincount(contexts)
    agreeing = np.bincount(contexts, weights=agree[known])
    return float((agreeing[count > 0] / count[count > 0]).mean())


def _places(reference: Fingerprint) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the position within its probe, and the probe's number of positions, shape (N,)."""
    sizes = np.array([len(probe) - 1 for probe in reference.probes])
    return np.concatenate([np.arange(size) for size in sizes]), np.repeat(sizes, sizes)


def _mean(values: NDArray[Any]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
