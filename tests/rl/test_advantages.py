"""Advantages compared with their formulas as plain Python loops, and properties for any input."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.rl import advantages

EXACT = 1e-12
"""Relative tolerance of float64."""

IN_GROUPS = (advantages.group_centered, advantages.group_normalized, advantages.leave_one_out)

response_lengths = st.lists(st.integers(1, 7), min_size=1, max_size=6)
numbers = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3))
few = settings(max_examples=25, deadline=None)


def doubles(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def drawn(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def by_response(flat: torch.Tensor, lengths: Sequence[int]) -> list[list[float]]:
    return [part.tolist() for part in flat.split(list(lengths))]


def gae_written_out(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> list[float]:
    """Eq. 16 of arXiv:1506.02438 as a plain sum, without its recursion."""
    after = [*values[1:], 0.0]
    surprises = [r + gamma * n - v for r, n, v in zip(rewards, after, values, strict=True)]
    return [
        sum((gamma * lam) ** k * d for k, d in enumerate(surprises[t:]))
        for t in range(len(surprises))
    ]


@few
@given(response_lengths, st.floats(0, 1), st.floats(0, 1), st.integers(0, 9))
def test_gae_equals_its_sum_for_every_response(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    rewards, values = drawn(sum(lengths), seed), drawn(sum(lengths), seed + 10)
    actual, returns = advantages.gae(rewards, values, torch.tensor(lengths), gamma=gamma, lam=lam)
    wanted = [
        a
        for r, v in zip(by_response(rewards, lengths), by_response(values, lengths), strict=True)
        for a in gae_written_out(r, v, gamma, lam)
    ]
    torch.testing.assert_close(actual, doubles(wanted), rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(returns, doubles(wanted) + values, rtol=EXACT, atol=EXACT)


def test_half_precision_is_computed_in_float32() -> None:
    """A thousand rewards of 0.01 do not add up in bfloat16: the sum stops at 4."""
    rewards = torch.full((1000,), 0.01, dtype=torch.bfloat16)
    actual = advantages.returns_to_go(rewards, torch.tensor([1000]), gamma=1.0)
    assert actual.dtype == torch.float32
    assert float(actual[0]) == pytest.approx(1000 * float(rewards[0]), rel=1e-5)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and group numbers: groups of 2 to 5 members in any order."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    names = draw(st.permutations([7 * g + 3 for g, size in enumerate(sizes) for _ in range(size)]))
    scores = draw(st.lists(numbers, min_size=len(names), max_size=len(names)))
    return doubles(scores), torch.tensor(names)


def members(groups: torch.Tensor, of: int) -> list[int]:
    return [j for j in range(len(groups)) if groups[j] == groups[of]]


@few
@given(grouped())
def test_group_estimates_are_their_formulas(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    scores, groups = data
    actual = torch.stack([estimate(*data) for estimate in IN_GROUPS], dim=1).tolist()
    for i, score in enumerate(scores.tolist()):
        own = [float(scores[j]) for j in members(groups, i)]
        others = [float(scores[j]) for j in members(groups, i) if j != i]
        centered = score - statistics.fmean(own)
        deviation = statistics.stdev(own)
        normalized = centered / deviation if deviation else 0.0
        left_out = score - statistics.fmean(others)
        wanted = [centered, normalized, left_out]
        assert actual[i] == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("size", [1, 3])
def test_equal_scores_give_exactly_zero(size: int) -> None:
    """In floating point the mean of three times 0.1 is not 0.1."""
    scores, groups = torch.full((size,), 0.1), torch.zeros(size, dtype=torch.int64)
    for estimate in IN_GROUPS:
        assert estimate(scores, groups).tolist() == [0.0] * size
    assert advantages.whiten(scores).tolist() == [0.0] * size


def test_scores_that_differ_by_rounding_alone_have_no_signal() -> None:
    """Normalised to +-1, rounding would become the training signal."""
    scores = torch.tensor([0.7, 0.7 + 6e-8, 0.7], dtype=torch.float32)
    assert scores.unique().numel() == 2
    actual = advantages.group_normalized(scores, torch.zeros(3, dtype=torch.int64))
    assert actual.tolist() == [0.0, 0.0, 0.0]
