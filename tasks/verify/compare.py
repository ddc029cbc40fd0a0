"""Compare a server's log-probabilities with the fingerprints of a reference.

A server returns few ids per position (its most likely ones and the sequence's own next token), a
fingerprint has up to 512. The KL is that of `tasks.drift`, a lower bound: the ids that both have,
and one rest bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.drift.fingerprint import (
    PROFILES,
    Drift,
    DriftLimit,
    Fingerprint,
    agreeing,
    by_context,
    kl_numbers,
    steps_in,
)
from tasks.drift.verdict import Share, adapter_share, deviation, limit_in, noise_of, tolerance
from tasks.verify.reference import Reference
from tasks.verify.server import EMPTY, SAMPLED, Scores, Server, UnsupportedError, score
from tasks.witness.plumbline_witness.prints import kl_by_position

COARSEST = 5.0
"""Least effect of an adapter, in units of a 16-bit trainer's noise: its dose is 0.1 off."""
BLURRED = 1.0
"""Bias of the dose at which the base could be the trained model."""
FEWEST = 10
"""Positions below which nothing is said about a server."""
_TINY = 1e-6
"""Mass below which the rest of a distribution is rounding of the numbers in JSON."""
_ON_GRID = 0.9
"""Share of differences that are multiples of a format's steps, if logits have that format."""
_JSON = 2e-5
"""Rounding of two log-probabilities in float32 (nats)."""


@dataclass(frozen=True)
class Aligned:
    """A server's answers by position and id of a fingerprint, shapes (N, K) and (N,)."""

    logprobs: NDArray[Any]  # at the fingerprint's ids; NaN where the server returned none
    extra_mass: NDArray[Any]  # probability of the ids that the fingerprint does not have
    floor: NDArray[Any]  # log-probability that no id outside of the server's list exceeds
    top1: NDArray[np.int64]  # the most likely id; -1 if it is not known
    measured: NDArray[np.bool_]  # the server answered


@dataclass(frozen=True, kw_only=True)
class Distance(Drift):
    """Lower bound of KL(reference || server) at the positions of a fingerprint, in nats.

    The top-1 agreement is NaN without alternatives.
    """

    kl: NDArray[Any]  # by position, shape (N,); NaN where nothing was measured
    mass: float  # the reference's probability mass at the ids that the server returned
    first_kl: float  # mean over the first positions of all probes, where no token looks back
    # KL per nat of the reference's entropy in the last third of each probe, divided by that in the
    # first third: noise moves a certain distribution less than an open one, wherever it stands
    growth: float


def align(reference: Fingerprint, scores: Sequence[Scores]) -> Aligned:
    """Put a server's answers, one for each probe, at the positions and ids of a fingerprint.

    Values that are not log-probabilities are left out. Raises ValueError for other sequences.
    """
    following = [token for probe in reference.probes for token in probe[1:]]
    rows = [entry for score in scores for entry in score]
    if len(rows) != len(following):
        raise ValueError(f"scores of {len(rows)} positions, expected {len(following)}")
    count, size = reference.ids.shape
    logprobs = np.full((count, size), np.nan)
    mass, floor = np.zeros(count), np.zeros(count)
    top1, measured = np.full(count, -1, np.int64), np.zeros(count, bool)
    for at, ((ids, values), own) in enumerate(zip(rows, following, strict=True)):
        usable = np.isfinite(values) & (values <= 1e-3)
        ids, values = np.asarray(ids)[usable], np.asarray(values, np.float64)[usable]
        if not len(ids):
            continue
        measured[at] = True
        here, there = np.nonzero(ids[:, None] == reference.ids[at])
        logprobs[at, there] = values[here]
        mass[at] = np.exp(np.delete(values, here)).sum()
        others = values[ids != own]  # the own token may have a lower rank than the others
        if len(others):
            floor[at], top1[at] = others.min(), ids[values.argmax()]
    return Aligned(logprobs, mass, floor, top1, measured)


def kl_of(reference: Fingerprint, served: Aligned) -> NDArray[Any]:
    """Return KL(reference || server) by position (nats), shape (N,); NaN if not measured."""
    listed = ~np.isnan(served.logprobs)
    p = np.where(listed, np.exp(reference.logprobs.astype(np.float64)), 0.0)
    q = np.where(listed, np.exp(served.logprobs), 0.0)
    # Numbers in JSON may sum to 1: the rest keeps a mass of `_TINY`.
    return np.where(served.measured, kl_by_position(p, q * (1 - _TINY)), np.nan)


def distance(reference: Fingerprint, served: Aligned, limit: DriftLimit) -> Distance:
    """Return the distance of a server from a fingerprint.

    Tokens that noise within the limit may swap are a tie. Raises ValueError if nothing was
    measured.
    """
    kl, measured = kl_of(reference, served), served.measured
    if not measured.any():
        raise ValueError("no position was measured")
    sizes = np.array([len(probe) - 1 for probe in reference.probes])
    place: NDArray[Any] = np.concatenate([np.arange(size) for size in sizes])
    length: NDArray[Any] = np.repeat(sizes, sizes)
    listed = np.where(np.isnan(served.logprobs), -np.inf, reference.logprobs)[measured]
    logprobs = np.maximum(reference.logprobs.astype(np.float64), -1e3)
    entropy = -(np.exp(logprobs) * logprobs).sum(1)
    first = _mean(kl, entropy, measured & (place < length / 3))
    last = _mean(kl, entropy, measured & (place >= 2 * length / 3))
    # Two standard deviations of the difference of two tokens under noise of KL = variance / 2.
    agree = agreeing(reference, served.top1, "bfloat16", 4 * limit.mean_kl**0.5)
    return Distance(
        **kl_numbers(kl[measured]),
        top1_agreement=by_context(reference.probes, agree, served.top1 >= 0),
        kl=kl,
        mass=float(np.exp(listed).sum(1).mean()),
        first_kl=_mean(kl, np.ones_like(kl), measured & (place == 0)),
        growth=last / max(first, 1e-12),
    )


def _mean(kl: NDArray[Any], weights: NDArray[Any], where: NDArray[np.bool_]) -> float:
    """Return the KL of some positions per unit of their weights; NaN without any."""
    total = float(weights[where].sum())
    return float(kl[where].sum()) / total if total > 0 else float("nan")


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
        clear = (behind > _JSON) & (unit > 16 * _JSON)
        if not clear.any():
            return None
        off = np.abs(behind - unit * np.round(behind / unit))[clear]
        if (off < _JSON).mean() > _ON_GRID:
            return dtype
    return "float32"


class Asked:
    """A server that is compared with a reference; each name is asked once.

    `model` and `base` are names on the server: what should be the trained model, and its base.
    `positions` are measured of a probe where each costs a request.
    """

    def __init__(
        self,
        server: Server,
        model: str,
        base: str | None,
        reference: Reference,
        profile: DriftLimit = PROFILES["standard"],
        *,
        positions: int = SAMPLED,
    ) -> None:
        self.server, self.reference = server, reference
        self.model, self.base, self.profile = model, base, profile
        self._positions = positions
        self._scores: dict[str, list[Scores]] = {}
        self._aligned: dict[str, Aligned] = {}

    @cached_property
    def is_slow(self) -> bool:
        """True if each scored position costs a request."""
        try:
            self.server.score(self.model, [])
        except UnsupportedError:
            return True
        return False

    def length(self, model: str) -> int | None:
        """Return the context of a name or of its base, in tokens; None if the server says none."""
        served = {entry.name: entry for entry in self.server.models()}
        entry = served.get(model)
        parent = served.get(entry.parent or "") if entry else None
        return next((each.max_length for each in (entry, parent) if each and each.max_length), None)

    def scores(self, model: str) -> list[Scores]:
        """Return the log-probabilities of the probes under a name of the server.

        Probes that are longer than the server's context are cut: what is beyond is not measured.
        """
        if model not in self._scores:
            whole = self.reference.sequences
            most = (self.length(model) or max(map(len, whole)) + 1) - 1  # one is generated
            parts = score(self.server, model, [ids[:most] for ids in whole], most=self._positions)
            self._scores[model] = [
                [*part, *[EMPTY] * (len(ids) - 1 - len(part))]
                for ids, part in zip(whole, parts, strict=True)
            ]
        return self._scores[model]

    def aligned(self, model: str) -> Aligned:
        """Return the log-probabilities by position and id of the reference."""
        if model not in self._aligned:
            self._aligned[model] = align(self.reference.trained, self.scores(model))
        return self._aligned[model]

    @property
    def format(self) -> str:
        """Torch name of the dtype that the server computes in; bfloat16 if nothing tells it."""
        seen = (format_of(self.reference.trained, each) for each in list(self._aligned.values()))
        return next((dtype for dtype in seen if dtype), "bfloat16")

    @cached_property
    def limit(self) -> DriftLimit:
        """The profile's limits, widened by the measured noise of the server's format."""
        return limit_in(self.profile, self.reference.trained, self.format)

    @cached_property
    def noise(self) -> float:
        """Effect of an adapter below which its dose cannot be measured (nats).

        A 16-bit trainer's own noise is in both of its prints. It would pull the dose towards one
        half, by the share that it has in their difference.
        """
        trained = self.reference.trained
        dtype = trained.arithmetic
        return 0.0 if dtype == "float32" else COARSEST * noise_of(trained, dtype)

    def distance(self, model: str) -> Distance:
        """Return the distance of a name from the trained model."""
        return distance(self.reference.trained, self.aligned(model), self.limit)

    def from_base(self, model: str | None) -> Distance | None:
        """Return the distance of a name from the base; None without adapter, or without a name."""
        base = self.reference.base
        if base is None or model is None:
            return None
        return distance(base, self.aligned(model), self.limit)

    def from_siblings(self, model: str) -> dict[str, float]:
        """Return the mean KL of a name from other models whose records lie beside this one."""
        parts, nearby = self.scores(model), {}
        for name, other in self.reference.siblings():
            common, trained = self.reference.shared(other)
            aligned = align(trained, [parts[number] for number in common])
            if aligned.measured.any():
                nearby[name] = distance(trained, aligned, self.limit).mean_kl
        return nearby

    def dose(self, model: str) -> Share | None:
        """Return how much of the adapter a name applies: 0 is the base, 1 the trained model.

        None without adapter, or if it changes none of the probes.
        """
        trained, base, served = self.reference.trained, self.reference.base, self.aligned(model)
        if base is None:
            return None
        measured = adapter_share(trained, base, served.logprobs, served.measured)
        if measured is None:
            return None
        usual = noise_of(trained, self.format) / measured.signal  # of a correct server
        return replace(measured, remainder=max(0.0, measured.remainder - usual))

    def clear_dose(self, model: str) -> Share | None:
        """Return the same; None if the trainer's own noise would pull it towards one half."""
        measured = self.dose(model)
        return measured if measured is not None and measured.signal > self.noise else None

    def tolerance(self, measured: Share) -> float:
        """Return how far from 1 the dose of a correct server may be."""
        return tolerance(measured, self.reference.trained, self.format)

    def is_whole(self, measured: Share | None) -> bool:
        """Return True if a dose is that of a correct server, or the adapter changes nothing."""
        if measured is None or measured.is_whole:
            return True
        return abs(measured.value - 1) <= deviation(measured, self.reference.trained, self.format)

    def is_trained(self, model: str) -> bool:
        """Return True if a name answers as the trained model, with the whole of an adapter."""
        return not self.distance(model).beyond(self.limit) and self.is_whole(self.dose(model))
