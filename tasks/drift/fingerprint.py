"""Distance of two fingerprints, and limits on it, for language and reward models.

The format, and the rest bucket of the KL, stand in `plumbline_witness.prints`.

Top-1 agreement allows for ties. Two engines round each of two logits by at most half a step of
their dtype (0.125 in bf16 between 16 and 32), so a difference of less than `TIE_STEPS` = 2 steps
may have either sign in a correct engine: the new engine's top token *agrees* if the reference gives
it a log-probability less than two steps below its maximum. The steps are those of the reference's
dtype, or of a coarser one in which the caller knows that the new engine computes.

Probes share their first tokens (the chat template): agreement is a share of distinct contexts. KL
is a mean over positions. Differences of rewards are in standard deviations of the reference's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, DataError, DriftError
from tasks.core.terminal import command
from tasks.witness.plumbline_witness import prints
from tasks.witness.plumbline_witness.prints import BITS, FINE, FormatNoise, kl_by_position

TIE_STEPS = 2.0
"""Logits that differ by less than this many rounding steps are tied; see the module docstring."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of config.json that give the number of experts."""


class Fingerprint(prints.Fingerprint):
    """Log-probabilities of one model on the probes, with the errors of this package."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a fingerprint. Raises ArtifactError if the file is none."""
        try:
            return super().load(path)
        except prints.UNREADABLE as error:
            raise ArtifactError(f"{path} is not a readable fingerprint: {error}") from error


class ScorePrint(prints.ScorePrint):
    """Scores of one reward model on the probes, with the errors of this package."""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read scores. Raises ArtifactError if the file has none."""
        try:
            return super().load(path)
        except prints.UNREADABLE as error:
            raise ArtifactError(f"{path} does not hold scores: {error}") from error


_FLAT = 1e-5
"""Log-probabilities closer than this are equal, in nats: ten times the noise of float32. The least
difference of models initialised at random (hidden size 8, std 0.02) is 1,000 times as large."""
_HEAD, _FEWEST = 16, 8


def require_informative(measured: Fingerprint, what: str) -> None:
    """Raise DriftError if the distribution is uniform, or does not depend on the context.

    Any broken model would agree with such a reference. `what` names the model or file.
    """
    rows = -np.sort(-measured.logprobs, axis=1)
    if rows.shape[1] > 1 and (rows[:, 0] - rows[:, -1]).max() < _FLAT:
        reason = "every token has the same probability at every position"
    elif measured.positions >= _FEWEST and np.ptp(rows[:, :_HEAD], axis=0).max() < _FLAT:
        reason = "the probabilities are the same at every position, whatever the text"
    elif _of_last_token(measured, rows[:, :_HEAD]):
        reason = "the probabilities depend on the last token alone, not on the text before it"
    else:
        return
    raise DriftError(
        f"{what} is no reference: {reason}; matrices of the base may be zero",
        hint=command("audit", source="<the base>", values=True),
    )


def contexts(probes: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """Return the number of each position's context, the tokens before it; shape (N,)."""
    numbers: dict[tuple[int, ...], int] = {}
    return np.array(
        [
            numbers.setdefault(tuple(probe[:end]), len(numbers))
            for probe in probes
            for end in range(1, len(probe))
        ]
    )


def _of_last_token(measured: Fingerprint, rows: NDArray[np.float32]) -> bool:
    """Return True if all contexts that end with the same token have the same distribution."""
    last = np.concatenate([probe[:-1] for probe in measured.probes])
    _, first = np.unique(contexts(measured.probes), return_index=True)
    several = [group for token in set(last) if len(group := first[last[first] == token]) > 1]
    if sum(len(group) - 1 for group in several) < _FEWEST:
        return False
    return all(np.ptp(rows[group], axis=0).max() < _FLAT for group in several)


@dataclass(frozen=True)
class DriftLimit:
    """Limits of a drift profile.

    Max KL has no limit: between two correct engines a single position can change it by orders of
    magnitude.
    """

    mean_kl: float  # highest mean KL, in nats
    p95_kl: float  # highest 95th percentile of the KL, in nats
    top1_agreement: float
    # of reward models: highest mean absolute difference, in std of the reference scores; lowest
    # share of pairs of texts that both rank in the same order
    difference: float = 0.03
    order: float = 0.97
    kept: float = 0.9  # least share of an adapter's update that a merge has to keep
    share: float = 0.1  # largest distance from 1 of the share of an adapter that answers
    # True for a mixture of experts, whose mean is held by the few positions where equal routers
    # choose other experts: `mean_kl` then is the limit of the median
    by_median: bool = False
    measured: str = ""  # what widened the limits; empty for those of the profile


PROFILES = {
    "strict": DriftLimit(1e-4, 5e-4, 0.99, difference=0.01, order=0.99),
    "standard": DriftLimit(1e-3, 5e-3, 0.97),
    "relaxed": DriftLimit(1e-2, 5e-2, 0.95, difference=0.1, order=0.95, kept=0.0, share=0.5),
}
QUANTIZED = {
    "int8": DriftLimit(1e-2, 5e-2, 0.95, share=0.5),
    "fp8": DriftLimit(2e-2, 1e-1, 0.92, share=0.5),
    "int4": DriftLimit(1e-1, 5e-1, 0.85, share=0.5),
}
"""Limits for `convert.quantize`, by number format: first values, from the small models in
docs/delivery.md."""
_FORMATS = {
    "w8a8": "int8", "fp8": "fp8",
    "gguf:f16": "standard", "gguf:bf16": "standard", "gguf:q8_0": "int8", "gguf:q6_k": "int8",
    "gguf:q5_k_m": "fp8", "gguf:q4_k_m": "int4",
}  # fmt: skip
EXACT = DriftLimit(1e-5, 1e-4, 0.99, difference=1e-3, order=0.99)
"""Limits for hand-offs that change no number, only the files: trained -> gathered."""


def quantized_profile(scheme: str, name: str = "auto") -> DriftLimit:
    """Return the limits for `convert.quantize`, by `convert.quantize_profile`."""
    return {**PROFILES, **QUANTIZED}[_FORMATS[scheme] if name == "auto" else name]


class Term(NamedTuple):
    """A number of a drift, and its limit."""

    name: str
    value: float
    limit: float
    sign: str = "<="  # or ">="

    @property
    def is_beyond(self) -> bool:
        """True if the limit is exceeded; False for NaN."""
        return self.value < self.limit if self.sign == ">=" else self.value > self.limit


class _Limited:
    """A drift whose numbers have limits."""

    def terms(self, limit: DriftLimit, noise: float | None = None) -> list[Term]:
        """Return the mean, a second number, and others, with their limits.

        With the engine's repeat noise, the mean has to stay within twice of it, too.
        """
        raise NotImplementedError

    def beyond(self, limit: DriftLimit, noise: float | None = None) -> list[str]:
        """Return one text for each limit that is exceeded; empty if it is within all."""
        return [
            f"{term.name} {term.value:.3g}, not {term.sign} {term.limit:.3g}"
            for term in self.terms(limit, noise)
            if term.is_beyond
        ]


@dataclass(frozen=True)
class Drift(_Limited):
    """Distance of a fingerprint from its reference: KL(reference || new) by position, in nats."""

    mean_kl: float
    p95_kl: float
    max_kl: float
    top1_agreement: float  # share of distinct contexts in which the top tokens agree, ties included
    median_kl: float = 0.0

    @property
    def noise(self) -> FormatNoise:
        """The same as the noise of a format."""
        return FormatNoise(self.mean_kl, self.p95_kl, self.median_kl, self.top1_agreement)

    def terms(self, limit: DriftLimit, noise: float | None = None) -> list[Term]:
        """Return the numbers with their limits."""
        terms = [
            Term("mean KL", self.mean_kl, limit.mean_kl),
            Term("p95 KL", self.p95_kl, limit.p95_kl),
            Term("top-1 agreement", self.top1_agreement, limit.top1_agreement, ">="),
        ]
        if limit.by_median:
            terms[0] = Term("median KL", self.median_kl, limit.mean_kl)
        if noise is not None:
            terms.append(Term("mean KL (twice the repeat noise)", self.mean_kl, 2 * noise))
        return terms

    def __str__(self) -> str:
        return (
            f"mean KL {self.mean_kl:.2e}, p95 KL {self.p95_kl:.2e}, "
            f"top-1 agreement {self.top1_agreement:.4f}"
        )


@dataclass(frozen=True)
class RewardDrift(_Limited):
    """Difference of scores from those of a reference."""

    mean_difference: float  # mean absolute difference over the texts, in `unit`
    max_difference: float
    same_order: float  # share of the pairs that the reference scores differently
    unit: float  # standard deviation of the reference scores

    def terms(self, limit: DriftLimit, noise: float | None = None) -> list[Term]:
        """Return the numbers with their limits; the noise is in scores."""
        name = "mean difference"
        terms = [
            Term(name, self.mean_difference, limit.difference),
            Term("pairs in the same order", self.same_order, limit.order, ">="),
        ]
        if noise is not None:
            by_noise = 2 * noise / self.unit
            terms.append(Term(f"{name} (twice the repeat noise)", self.mean_difference, by_noise))
        return terms

    def __str__(self) -> str:
        return (
            f"mean difference {self.mean_difference:.2e} (at most {self.max_difference:.2e}) of "
            f"{self.unit:.3g}, {self.same_order:.4f} of the pairs in the same order"
        )


def steps_in(reference: Fingerprint, dtype: str | None) -> NDArray[np.float64] | None:
    """Return the rounding steps at the largest logits (nats), shape (N,); None if unknown.

    A dtype (torch name) that is coarser than the reference's own has larger steps.
    """
    if reference.steps is None:
        return None
    steps = reference.steps.astype(np.float64)
    if dtype is None:
        return steps
    bits = BITS[reference.arithmetic] - BITS[dtype]
    return steps * 2.0**bits if np.median(steps) < FINE and bits > 0 else steps


def agreeing(
    reference: Fingerprint, top1: NDArray[Any], dtype: str | None = None, least: float = 0.0
) -> NDArray[np.bool_]:
    """Return, for each position, True if the top tokens agree within rounding; shape (N,).

    The module docstring has the rule. A token outside the reference's ids never agrees, unless it
    is the reference's own top token. `dtype` is the dtype (torch name) that the new engine is known
    to compute in; tokens closer than `least` (nats) are a tie in any case.
    """
    at_id = np.where(reference.ids == top1[:, None], reference.logprobs, -np.inf).max(axis=1)
    behind, steps = reference.logprobs.max(axis=1) - at_id, steps_in(reference, dtype)
    tie = np.maximum(least, 0.0 if steps is None else TIE_STEPS * steps)
    agree: NDArray[np.bool_] = (behind == 0) | (behind < tie) | (reference.top1 == top1)
    return agree


def by_context(
    probes: Sequence[Sequence[int]],
    agree: NDArray[np.bool_],
    measured: NDArray[np.bool_] | None = None,
) -> float:
    """Return the share of distinct contexts that agree; NaN if no position was measured.

    A context with several positions counts with their mean. `agree` has one value per position,
    `measured` is True at those that count.
    """
    known = np.ones(len(agree), bool) if measured is None else measured
    if not known.any():
        return float("nan")
    numbers = contexts(probes)[known]
    _, each, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return float((np.bincount(each, weights=agree[known]) / counts).mean())


def drift(reference: Fingerprint, new: Fingerprint, dtype: str | None = None) -> Drift:
    """Return the distance of `new` from `reference`; `dtype` as in `agreeing`.

    Raises DriftError if they score other tokens, or values are not log-probabilities.
    """
    if reference.probes != new.probes or not np.array_equal(reference.ids, new.ids):
        raise DriftError("fingerprints are not comparable: they score other tokens")
    for side in (reference, new):
        if np.isnan(side.logprobs).any() or (side.logprobs > 1e-3).any():
            raise DriftError(
                f"the {side.engine} fingerprint holds values that are not log-probabilities"
            )
    kl = kl_by_position(*(np.exp(side.logprobs.astype(np.float64)) for side in (reference, new)))
    agree = agreeing(reference, new.top1, dtype)
    return Drift(**kl_numbers(kl), top1_agreement=by_context(reference.probes, agree))


def kl_numbers(kl: NDArray[np.float64]) -> dict[str, float]:
    """Return the numbers of a `Drift` about the KL by position."""
    numbers = {"mean_kl": kl.mean(), "p95_kl": np.quantile(kl, 0.95), "max_kl": kl.max()}
    return {name: float(value) for name, value in {**numbers, "median_kl": np.median(kl)}.items()}


def score_drift(reference: ScorePrint, new: ScorePrint) -> RewardDrift:
    """Return the drift of `new` from `reference`.

    Raises DataError if the reference gives all texts the same score, which has no scale, and
    DriftError if a score is not finite, or of another text.
    """
    if reference.probes != new.probes:
        raise DriftError("scores are not comparable: they are of other texts")
    both = list(zip(reference.scores, new.scores, strict=True))
    if not all(math.isfinite(score) for pair in both for score in pair):
        raise DriftError("rewards that are NaN or infinite")
    unit = pstdev(reference.scores)
    if unit == 0:
        raise DataError(
            f"the reference gives all {len(both)} texts the same reward",
            hint="smoke.texts=<file with several different texts>, or smoke.engine=none",
        )
    differences = [abs(a - b) / unit for a, b in both]
    pairs = [(a, b) for a, b in combinations(both, 2) if a[0] != b[0]]
    alike = [(a[0] < b[0]) == (a[1] < b[1]) and a[1] != b[1] for a, b in pairs]
    return RewardDrift(fmean(differences), max(differences), fmean(alike), unit)
