"""Put a server's answers at the positions and ids of a fingerprint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.drift.fingerprint import Fingerprint
from tasks.verify.servers.server import Scores


@dataclass(frozen=True)
class Aligned:
    """A server's answers by position and id of a fingerprint, shapes (N, K) and (N,).

    Attributes:
        logprobs: at the fingerprint's ids; NaN where the server returned none.
        extra_mass: probability of the returned ids that the fingerprint does not have.
        extra_count: number of these ids.
        floor: log-probability that no id outside of the server's list exceeds.
        top1: the server's most likely id; -1 if it returned the sequence's own next token alone, or
            nothing.
        measured: True at the positions that the server answered.
    """

    logprobs: NDArray[Any]
    extra_mass: NDArray[Any]
    extra_count: NDArray[Any]
    floor: NDArray[Any]
    top1: NDArray[np.int64]
    measured: NDArray[np.bool_]


def align(reference: Fingerprint, scores: Sequence[Scores]) -> Aligned:
    """Put a server's answers at the positions and ids of a fingerprint.

    Args:
        reference: the fingerprint.
        scores: one entry per probe, in the order of `reference.probes`. Values that are not
            log-probabilities are left out.

    Raises:
        ValueError: the scores are of other sequences.
    """
    following = [token for probe in reference.probes for token in probe[1:]]
    rows = [row for score in scores for row in zip(score.ids, score.logprobs, strict=True)]
    if len(rows) != len(following):
        raise ValueError(f"scores of {len(rows)} positions, expected {len(following)}")
    shape = reference.ids.shape
    logprobs = np.full(shape, np.nan)
    mass, count, floor = np.zeros(shape[0]), np.zeros(shape[0]), np.zeros(shape[0])
    top1, measured = np.full(shape[0], -1, np.int64), np.zeros(shape[0], bool)
    for at, ((ids, values), own) in enumerate(zip(rows, following, strict=True)):
        usable = np.isfinite(values) & (values <= 1e-3)
        ids, values = np.asarray(ids)[usable], np.asarray(values, np.float64)[usable]
        if not len(ids):
            continue
        order = np.argsort(reference.ids[at], kind="stable")
        slots = np.searchsorted(reference.ids[at], ids, sorter=order)
        slots = order[np.minimum(slots, shape[1] - 1)]
        shared = reference.ids[at][slots] == ids
        logprobs[at, slots[shared]] = values[shared]
        mass[at], count[at] = np.exp(values[~shared]).sum(), (~shared).sum()
        listed = values[ids != own]  # the own token may have a lower rank than the others
        floor[at] = listed.min() if len(listed) else 0.0
        measured[at] = True
        if len(listed):
            top1[at] = ids[values.argmax()]
    return Aligned(logprobs, mass, count, floor, top1, measured)
