"""Loss, gradients and fingerprints do not depend on the ranks, nor on how they share rows."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from tasks.drift.fingerprint import Fingerprint, ScorePrint
from tasks.training.job import TrainJob
from tests.training.jobs import (
    DEFAULT,
    SHARED,
    Trained,
    shared,
)
from tests.training.places import results

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
    whole, shared = (
        load_file(job.out.parent / "gradients.safetensors") for job in (alone, divided)
    )
    assert whole.keys() == shared.keys()
    assert sum(bool(gradient.any()) for gradient in whole.values()) > len(whole) / 2
    for key, gradient in whole.items():
        apart = float((shared[key] - gradient).abs().max())
        assert apart <= TOLERANCE * max(float(gradient.abs().max()), 1e-6), (name, key, apart)


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
    names = ("sft_zero3", "sft", "dpo", "experts")
    alone = trained.train(trained.folder / "one", {n: shared(n, 1, 1) for n in names}, 1)
    for sharing in (2, 4):
        wanted = {name: shared(name, sharing, 4) for name in names}
        divided = trained.train(trained.folder / f"four-{sharing}", wanted, 4)
        for name in names:
            require_same(alone[name], divided[name], name)
