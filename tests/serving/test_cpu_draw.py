"""Tokens drawn by the inverse of the sums: against exact sums, and against what has no chance."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.serving.cpu_draw import BLOCK, draw, uniforms, use_inverse_draws

SIZES = [1, 2, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 5]
TOP = 1 - 2.0**-53
"""The largest number that a generator gives."""


def probabilities(rows: int, size: int, *, seed: int, zeros: float) -> torch.Tensor:
    make = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, size, generator=make)
    gone = torch.rand(rows, size, generator=make) < zeros
    gone[torch.arange(rows), logits.argmax(1)] = False
    return logits.masked_fill(gone, -torch.inf).softmax(-1)


def exactly(probs: torch.Tensor, uniform: float) -> tuple[int, Fraction]:
    """The token, and how far the goal is from the nearest end of its share."""
    sums = list(accumulate(Fraction(float(one)) for one in probs))
    goal = Fraction(uniform) * sums[-1]
    token = next((at for at, one in enumerate(sums) if one > goal), len(sums) - 1)
    ends = (sums[token - 1] if token else Fraction(0), sums[token])
    return token, min(abs(goal - end) for end in ends)


@given(
    size=st.sampled_from(SIZES),
    seed=st.integers(0, 99),
    zeros=st.sampled_from([0.0, 0.5, 0.99]),
    uniform=st.one_of(st.floats(0, TOP), st.sampled_from([0.0, TOP])),
)
@settings(max_examples=150, deadline=None)
def test_it_is_where_exact_sums_are(size: int, seed: int, zeros: float, uniform: float) -> None:
    probs = probabilities(3, size, seed=seed, zeros=zeros)
    drawn = draw(probs, torch.full((3,), uniform, dtype=torch.float64))
    for row, token in zip(probs, drawn.tolist(), strict=True):
        assert row[token] > 0
        expected, room = exactly(row, uniform)
        if room > Fraction(1, 10**6) and uniform < TOP:  # blocks are summed up in fp32
            assert token == expected


@pytest.mark.parametrize("alone", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 3])
def test_a_token_that_has_everything(alone: int) -> None:
    probs = torch.zeros(3, 2 * BLOCK + 4)
    probs[:, alone] = 1.0
    drawn = draw(probs, torch.tensor([0.0, 0.5, TOP], dtype=torch.float64))
    assert drawn.tolist() == [alone] * 3


def test_shares_are_the_probabilities() -> None:
    """Pearson's statistic over 13 groups of tokens; 40.8 is its 99.99th percentile of 12."""
    probs = probabilities(1, 650, seed=5, zeros=0.2)
    made = torch.Generator().manual_seed(1)
    many = torch.rand(100_000, generator=made, dtype=torch.float64)
    drawn = torch.cat([draw(probs.expand(len(some), -1), some) for some in many.split(5_000)])
    counts = np.bincount(drawn.numpy() // 50, minlength=13)
    expected = probs[0].double().unflatten(0, (13, 50)).sum(1).numpy() * len(many)
    assert float(((counts - expected) ** 2 / expected).sum()) < 40.8


def test_each_reply_has_a_generator_of_its_own() -> None:
    """Whoever else is in the batch, and where."""
    alone = uniforms(1, {0: torch.Generator().manual_seed(7)})
    beside = uniforms(3, {2: torch.Generator().manual_seed(7)})
    assert alone[0] == beside[2]
    assert beside[0] != beside[1]


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_the_sampler_of_vllm(mode: str) -> None:
    """Its cut is respected, and what it tells of the draw has the cut in it."""
    use_inverse_draws()
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    sampler = object.__new__(TopKTopPSampler)
    torch.nn.Module.__init__(sampler)
    sampler.logprobs_mode = mode
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(0))
    best = logits.topk(3, dim=1).indices
    generators = {row: torch.Generator().manual_seed(row) for row in range(64)}
    drawn, told = sampler.forward_cpu(logits.clone(), generators, torch.full((64,), 3), None)
    assert bool((best == drawn[:, None]).any(1).all())
    assert len(set((best == drawn[:, None]).int().argmax(1).tolist())) == 3
    if mode == "raw_logprobs":
        assert told is None
        return
    kept = torch.full_like(logits, -torch.inf).scatter(1, best, logits.gather(1, best))
    assert told is not None
    torch.testing.assert_close(told, kept.log_softmax(1))
