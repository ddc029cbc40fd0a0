"""Loss, weights and fingerprints do not depend on the ranks, nor on how they share rows."""

from __future__ import annotations

import pytest
import torch

from tasks.drift.fingerprint import Fingerprint, ScorePrint
from tasks.training.job import TrainJob
from tests.training.jobs import (
    DEFAULT,
    SHARED,
    Trained,
    shared,
)
from tests.training.places import results, start_weights, weights

pytestmark = pytest.mark.timeout(2400)
TOLERANCE = 1e-5
"""Largest difference of a number, and of a gradient relative to its largest number, in fp32."""
RATIO = 1e-4
"""Largest difference of a log-ratio: both of its sums are hundreds of nats."""


def require_same(alone: TrainJob, divided: TrainJob, name: str) -> None:
    """Compare a case's numbers and gradients with those on other ranks."""
    expected, measured = results(alone), results(divided)
    assert measured["losses"] == pytest.approx(expected["losses"], rel=TOLERANCE), name
    for before, after in zip(expected["evaluations"], measured["evaluations"], strict=True):
        assert after == pytest.approx(before, rel=TOLERANCE, abs=RATIO), name
    kind = ScorePrint if objective_of(name) == "reward" else Fingerprint
    prints = [kind.load(job.out / expected["print"]) for job in (alone, divided)]
    numbers = [p.scores if kind is ScorePrint else p.logprobs.ravel() for p in prints]
    assert list(numbers[1]) == pytest.approx(list(numbers[0]), rel=TOLERANCE, abs=TOLERANCE)
    # AdamW with a large epsilon follows the gradient, as SGD does: equal weights, equal gradients.
    start, before, after = start_weights(alone), weights(alone), weights(divided)
    moved = [key for key in start if not torch.equal(start[key], before[key])]
    assert len(moved) > len(start) / 2
    for key in start:
        step = (before[key] - start[key]).abs().max()
        apart = float((after[key] - before[key]).abs().max())
        assert apart <= 3e-4 * max(float(step), 1e-4), (name, key, apart)


def objective_of(name: str) -> str:
    return SHARED[name].settings.objective if name in SHARED else "sft"


@pytest.mark.parametrize(
    "name",
    [n if f"{n}_over_1" in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in SHARED],
)
def test_two_ranks_share_rows_exactly(trained: Trained, name: str) -> None:
    require_same(trained[f"{name}_over_1"], trained[f"{name}_over_2"], name)


@pytest.mark.slow
def test_any_number_of_ranks(trained: Trained) -> None:
    """One rank, two groups of two, and one of four, with fewer key heads than ranks."""
    names = ("sft", "dpo", "experts")
    alone = trained.train(trained.folder / "one", {n: shared(n, 1, 1) for n in names}, 1)
    for sharing in (2, 4):
        wanted = {name: shared(name, sharing, 4) for name in names}
        divided = trained.train(trained.folder / f"four-{sharing}", wanted, 4)
        for name in names:
            require_same(alone[name], divided[name], name)
