"""Estimate sampling settings from tokens that were sampled: temperature, top-k, top-p, min-p.

At temperature T an id has a probability proportional to p^(1/T), so T is estimated by maximum
likelihood. What top-k, top-p or min-p cut off never comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

DOUBT = 12.0
"""Log-likelihood ratio (nats): true settings are refused about once in 100,000 times."""
BETAS = np.exp(np.linspace(math.log(0.2), math.log(50.0), 141))
"""Values of 1/T that are tried."""
MARGIN = 0.15
"""Difference of two log-probabilities (nats) that rounding of a correct engine may undo."""
COARSE = 0.7
"""A factor of the temperature that every user would notice."""


@dataclass(frozen=True)
class Drawn:
    """First tokens after one prompt.

    Attributes:
        logp: log-probabilities at temperature 1, the most likely first, shape (K,).
        counts: how often each was sampled, shape (K,).
        usable: False for ids of the prompt, which penalties change, and EOS, which servers may
            leave out; shape (K,).
        outside: samples of other ids.
    """

    logp: NDArray[Any]
    counts: NDArray[Any]
    usable: NDArray[Any]
    outside: int


@dataclass(frozen=True)
class Settings:
    """Sampling settings.

    Attributes:
        beta: 1 / temperature; infinite for greedy.
        top_k: 0 for none.
        top_p: 1 for none.
        min_p: 0 for none.
    """

    beta: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def text(self) -> str:
        """The settings for a person."""
        parts = [f"temperature {1 / self.beta:.2g}"]
        parts += [f"top_k {self.top_k}"] * (self.top_k > 0)
        parts += [f"top_p {self.top_p:.2g}"] * (self.top_p < 1)
        parts += [f"min_p {self.min_p:.2g}"] * (self.min_p > 0)
        return ", ".join(parts)

    def count(self, row: Drawn) -> int:
        """Return how many ids can be sampled: the most likely ones."""
        if self.top_p >= 1 and self.min_p <= 0:
            return min(self.top_k or len(row.logp), len(row.logp))
        p, before = _tempered(row, self.beta)
        kept = (before < self.top_p) & (p >= self.min_p * p[0])
        return min(max(1, int(kept.sum())), self.top_k or len(p))

    def kept(self, row: Drawn) -> NDArray[Any]:
        """Return True for the ids that can be sampled, shape (K,).

        Rounding decides on which side of the limit an id is whose log-probability is within
        `MARGIN` of it; what was sampled tells.
        """
        count, size = self.count(row), len(row.logp)
        if count < size:
            last = row.logp[count - 1]
            drawn = np.flatnonzero(row.counts)
            most = int(drawn[-1]) + 1 if len(drawn) else count
            fewest = max(1, int((row.logp > last + MARGIN).sum()))
            count = min(max(most, fewest), int((row.logp >= last - MARGIN).sum()))
        kept: NDArray[Any] = np.arange(size) < count
        return kept

    def likelihood(self, rows: Sequence[Drawn]) -> float:
        """Return the log-likelihood of what was sampled (nats), given that it is in the list."""
        total = 0.0
        for row in rows:
            kept = self.kept(row) & row.usable
            counts = np.where(row.usable, row.counts, 0)
            if counts[~kept].any() or (row.outside and self.count(row) < len(kept)):
                return -math.inf
            if kept.any() and counts.any():
                shifted = self.beta * (row.logp - row.logp[kept].max())
                total += (counts * shifted)[kept].sum()
                total -= counts.sum() * np.log(np.exp(shifted[kept]).sum())
        return float(total)


def fit(rows: Sequence[Drawn]) -> Settings:
    """Return the most likely settings; something is cut off only if that explains much more."""
    plain = max((Settings(beta) for beta in BETAS), key=lambda each: each.likelihood(rows))
    likelihood = plain.likelihood(rows)
    if any(row.outside for row in rows) or not any(row.counts.any() for row in rows):
        return plain
    coarse = [cut for beta in BETAS[::2] for cut in _cuts(rows, float(beta))]
    best = max(coarse, key=lambda each: each.likelihood(rows))
    near = BETAS[np.abs(np.log(BETAS / best.beta)) < 0.1]
    fine = [replace(best, beta=float(beta)) for beta in near]
    best = max([best, *fine], key=lambda each: each.likelihood(rows))
    return best if best.likelihood(rows) - likelihood > DOUBT else plain


def _cuts(rows: Sequence[Drawn], beta: float) -> list[Settings]:
    """Return the tightest top-k, top-p and min-p that allow what was sampled.

    Those of a few prompts, since rounding may have moved an id across the limit in one of them.
    """
    limits: list[tuple[int, float, float]] = []
    for row in rows:
        drawn = np.flatnonzero(row.counts)
        if len(drawn):
            p, before = _tempered(row, beta)
            last = int(drawn[-1])
            limits.append((last + 1, float(before[last]), float(p[last] / p[0])))
    top_k, top_p, min_p = (sorted(values, reverse=True) for values in zip(*limits, strict=True))
    cuts = [Settings(beta, top_k=value) for value in sorted(set(top_k[:4]))]
    cuts += [Settings(beta, top_p=min(1.0, value * (1 + 1e-9) + 1e-12)) for value in top_p[:4]]
    return cuts + [Settings(beta, min_p=value * (1 - 1e-9)) for value in min_p[-4:]]


def interval(rows: Sequence[Drawn], best: Settings) -> tuple[float, float]:
    """Return the temperatures that explain the counts nearly as well (likelihood ratio, 99.99 %).

    The share that top-p or min-p keep moves with the temperature; here, what is kept stays.
    """
    fixed = [
        Drawn(row.logp, row.counts, row.usable & best.kept(row), 0 if best.top_k else row.outside)
        for row in rows
    ]
    values = np.array([Settings(float(beta)).likelihood(fixed) for beta in BETAS])
    inside = BETAS[values > values.max() - 7.57]
    return float(1 / inside.max()), float(1 / inside.min())


def information(rows: Sequence[Drawn], expected: Settings) -> float:
    """Return the log-likelihood ratio (nats) that `COARSE` times the temperature would give."""
    total = 0.0
    for row in rows:
        logp = row.logp[row.usable]
        if len(logp) < 2:
            continue
        q, p = (_log_softmax(factor * expected.beta * logp) for factor in (1.0, 1 / COARSE))
        total += (row.counts * row.usable).sum() * float((np.exp(p) * (p - q)).sum())
    return total


def _log_softmax(values: NDArray[Any]) -> NDArray[Any]:
    shifted = values - values.max()
    normalised: NDArray[Any] = shifted - np.log(np.exp(shifted).sum())
    return normalised


def _tempered(row: Drawn, beta: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return probabilities at a temperature, and the mass before each; shapes (K,)."""
    p = np.exp(beta * (row.logp - row.logp[0]))
    rest = max(0.0, 1 - float(np.exp(row.logp).sum())) * math.exp(-row.logp[0]) if beta <= 1 else 0
    p = p / (p.sum() + rest)
    return p, np.cumsum(p) - p
