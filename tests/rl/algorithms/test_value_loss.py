"""The critic's loss and the penalty for long responses, compared with plain loops."""

from __future__ import annotations

import statistics

import pytest
import torch

from tasks.rl.algorithms.advantages import overlong_penalty
from tasks.rl.algorithms.batch import Totals
from tasks.rl.algorithms.value_loss import explained_variance, value_loss

TOTALS = Totals(tokens=12, sequences=3, max_new_tokens=8)
COUNT = 7


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cut(x: float, limit: float) -> float:
    return max(-limit, min(limit, x))


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_value_loss_equals_its_formula(clip: float | None) -> None:
    values, old, returns = drawn(0), drawn(1), drawn(2)
    total, decided = 0.0, 0
    for v, o, r in zip(values.tolist(), old.tolist(), returns.tolist(), strict=True):
        plain = (v - r) ** 2
        clipped = plain if clip is None else (o + cut(v - o, clip) - r) ** 2
        total += max(plain, clipped) / 2 / 12
        decided += clipped > plain
    actual = value_loss(values, old, returns, TOTALS, clip)
    assert float(actual.value) == pytest.approx(total, rel=1e-12)
    assert float(actual.measures["value_loss"]) == pytest.approx(total, rel=1e-12)
    assert float(actual.measures["value_clip_frac"]) == pytest.approx(decided / 12, rel=1e-12)
    assert (decided > 0) == (clip is not None)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_gradient_equals_finite_differences(clip: float | None) -> None:
    old, returns = drawn(1), drawn(2)
    values = drawn(0).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old, returns, TOTALS, clip).value, (values,)
    )


def test_explained_variance() -> None:
    values, returns = drawn(0), drawn(1)
    left = [r - v for r, v in zip(returns.tolist(), values.tolist(), strict=True)]
    wanted = 1 - statistics.pvariance(left) / statistics.pvariance(returns.tolist())
    assert explained_variance(values, returns) == pytest.approx(wanted, rel=1e-12)
    assert explained_variance(returns + 3, returns) == pytest.approx(1.0)
    assert explained_variance(torch.zeros(COUNT), returns) == pytest.approx(0.0, abs=1e-12)
    assert explained_variance(values, torch.ones(COUNT)) == 0.0


def test_the_overlong_penalty_grows_linearly_in_the_buffer() -> None:
    """Limit 20, buffer 8: eq. 13 of arXiv:2503.14476, times 2."""
    lengths = torch.tensor([1, 12, 13, 16, 19, 20])
    actual = overlong_penalty(lengths, limit=20, buffer=8, most=2.0)
    assert actual.tolist() == [0.0, 0.0, -0.25, -1.0, -1.75, -2.0]
    assert overlong_penalty(lengths, limit=20, buffer=0, most=2.0).tolist() == [0.0] * 6
