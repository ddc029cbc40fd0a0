"""Train-inference mismatch: its size, limits and corrections, compared with plain loops."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch

from tasks.config.choices import Correction
from tasks.core.errors import TrainingError
from tasks.rl.algorithms import correction

LENGTHS = [3, 1, 4, 2]
HIGH, LOW = 2.0, 0.5
RATIOS = [1.5, 0.9, 1.9, 0.3, 1.1, 0.95, 1.0, 1.0, 2.5, 0.6]
"""Ratios of the ten tokens; products by response: 2.565, 0.3, 1.045, 1.5."""


def logprobs() -> tuple[torch.Tensor, torch.Tensor]:
    sampled = -torch.linspace(0.1, 3.0, len(RATIOS), dtype=torch.float64)
    return sampled + torch.tensor(RATIOS, dtype=torch.float64).log(), sampled


def weights(kind: str) -> list[float]:
    old, sampled = logprobs()
    old.requires_grad_()
    actual = correction.weights(old, sampled, torch.tensor(LENGTHS), kind=kind, high=HIGH, low=LOW)
    assert not actual.requires_grad
    return actual.tolist()


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("none", [1.0] * 10),
        ("tis", [1.5, 0.9, 1.9, 0.3, 1.1, 0.95, 1.0, 1.0, 2.0, 0.6]),
        ("icepop", [1.5, 0.9, 1.9, 0.0, 1.1, 0.95, 1.0, 1.0, 0.0, 0.6]),
        ("sequence_mask", [0.0] * 3 + [0.0] + [1.045] * 4 + [1.5] * 2),
    ],
)
def test_weights(kind: str, wanted: list[float]) -> None:
    assert weights(kind) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("kind", get_args(Correction))
def test_engines_that_agree_need_no_correction(kind: str) -> None:
    same = logprobs()[0]
    actual = correction.weights(same, same, torch.tensor(LENGTHS), kind=kind, high=HIGH, low=LOW)
    assert actual.tolist() == [1.0] * 10


def test_unlimited_tis_corrects_expectations() -> None:
    """Over all tokens: sum of engine's p * weight * f = sum of trainer's p * f."""
    trainer = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    engine = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    worth = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64)
    actual = correction.weights(
        trainer.log(), engine.log(), torch.ones(3, dtype=torch.int64), kind="tis", high=1e9, low=0
    )
    assert float((engine * actual * worth).sum()) == pytest.approx(float((trainer * worth).sum()))


def test_mismatch() -> None:
    actual = correction.mismatch(*logprobs())
    logs = [math.log(r) for r in RATIOS]
    assert actual.mean_abs == pytest.approx(sum(abs(d) for d in logs) / 10, rel=1e-12)
    assert actual.max_abs == pytest.approx(max(abs(d) for d in logs), rel=1e-12)
    k3 = sum(math.exp(d) - 1 - d for d in logs) / 10
    assert actual.kl == pytest.approx(k3, rel=1e-12)


@pytest.mark.parametrize(("which", "whose"), [(0, "the trainer's"), (1, "the rollout engine's")])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_values_that_are_not_finite_end_training(which: int, whose: str, bad: float) -> None:
    """A limit alone would let NaN pass: `nan > limit` is false."""
    both = logprobs()
    both[which][[2, 5]] = bad
    with pytest.raises(TrainingError, match=f"2 of 10 of {whose}") as caught:
        correction.mismatch(*both)
    assert "train.lr" in caught.value.hint


def limits_after(*first: float) -> correction.MismatchLimits:
    """Limits after first iterations with these mismatches."""
    run = correction.MismatchLimits(limit=0.1, factor=4.0)
    for iteration, value in enumerate(first, 1):
        run.require_within(correction.Mismatch(value, value, value), iteration)
    return run


HEALTHY = (0.0058, 0.0064, 0.0068, 0.0053, 0.0047)
"""Mismatches of GRPO on the toy, seed 0."""


def test_a_drift_below_the_absolute_limit_is_warned_of_once() -> None:
    run = limits_after(*HEALTHY)
    assert run.relative == pytest.approx(4 * 0.0058)
    assert run.require_within(correction.Mismatch(0.0231, 1.0, 0.01), 9) == ""
    assert run.require_within(correction.Mismatch(0.0233, 1.0, 0.01), 9)
    assert run.require_within(correction.Mismatch(0.0999, 1.0, 0.01), 10) == ""
    with pytest.raises(TrainingError):
        run.require_within(correction.Mismatch(0.1001, 1.0, 0.01), 11)


def test_the_relative_limit_has_a_floor() -> None:
    run = limits_after(1e-7, 0.0, 2e-7)
    assert run.require_within(correction.Mismatch(0.0099, 1.0, 0.01), 4) == ""
    assert run.require_within(correction.Mismatch(0.0101, 1.0, 0.01), 5)


@pytest.mark.parametrize("value", [0.1001, 3.0])
def test_the_absolute_limit_stays(value: float) -> None:
    for run in (
        limits_after(),
        limits_after(0.09, 0.09),
        correction.MismatchLimits(0.1, 0.0, [1e-3]),
    ):
        with pytest.raises(TrainingError, match="rl.mismatch_limit=0.1"):
            run.require_within(correction.Mismatch(value, 4.0, 1.0), 3)


def test_without_a_factor_there_is_no_relative_limit() -> None:
    run = correction.MismatchLimits(0.1, 0.0, [1e-3])
    assert run.require_within(correction.Mismatch(0.0999, 1.0, 0.1), 3) == ""
