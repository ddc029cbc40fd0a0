"""The fingerprint that a server's lists of likely ids give is that of the whole distribution."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tasks.drift.fingerprint import Fingerprint, drift
from tasks.evaluation.serve_http import fingerprint_of
from tasks.verify.compare import align
from tasks.verify.server import Entry, Scores

PROBES = (tuple(range(40)), tuple(range(5, 60)))
POSITIONS = sum(len(probe) - 1 for probe in PROBES)


def logprobs(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return result


def printed(values: NDArray[np.float64], ids: NDArray[np.int32]) -> Fingerprint:
    at = np.take_along_axis(values, ids, 1).astype(np.float32)
    return Fingerprint(PROBES, ids, at, values.argmax(1).astype(np.int32), "test")


def listed(values: NDArray[np.float64], count: int) -> list[Scores]:
    """Return the `count` most likely ids of each position and its own next token."""
    entries = []
    for row, own in zip(values, (token for p in PROBES for token in p[1:]), strict=True):
        ids = np.unique([*np.argsort(-row)[:count], own])
        ids = ids[np.argsort(-row[ids])]
        entries.append(Entry(ids.astype(np.int32), row[ids].astype(np.float32)))
    split = len(PROBES[0]) - 1
    return [entries[:split], entries[split:]]


@pytest.mark.parametrize(("vocabulary", "noise"), [(300, 0.3), (2000, 0.05)])
def test_drift_is_that_of_all_ids(vocabulary: int, noise: float) -> None:
    chance = np.random.default_rng(vocabulary)
    logits = chance.normal(size=(POSITIONS, vocabulary)) * 3
    trained = logprobs(logits)
    served = logprobs(logits + chance.normal(size=logits.shape) * noise)
    ids = np.argsort(-trained)[:, :512].astype(np.int32)
    reference, exact = printed(trained, ids), printed(served, ids)
    seen = fingerprint_of(reference, align(reference, listed(served, 100)))
    measured, expected = drift(reference, seen), drift(reference, exact)
    assert 0.8 * expected.mean_kl < measured.mean_kl < 1.02 * expected.mean_kl
    assert measured.top1_agreement == expected.top1_agreement
