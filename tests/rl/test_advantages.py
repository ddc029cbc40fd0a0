"""Advantages compared with their formulas as plain Python loops; algorithms with the papers'."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.config.defaults import ALGORITHMS as DEFAULTS
from tasks.rl import advantages
from tasks.rl.algorithms import ALGORITHMS, findings
from tasks.rl.experience import Experience
from tests.rl.making import KL, drawn
from tests.settings import Loop

IN_GROUPS = (advantages.group_centered, advantages.group_normalized, advantages.leave_one_out)
few = settings(max_examples=25, deadline=None)


def doubles(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@few
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_gae_equals_its_sum_for_every_response(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    """Eq. 16 of arXiv:1506.02438 as a plain sum, without its recursion."""
    rewards, values = drawn(sum(lengths), seed), drawn(sum(lengths), seed + 10)
    actual, returns = advantages.gae(rewards, values, torch.tensor(lengths), gamma=gamma, lam=lam)
    wanted = []
    for r, v in zip(rewards.split(lengths), values.split(lengths), strict=True):
        surprises = (r + gamma * torch.cat([v[1:], doubles([0])]) - v).tolist()
        wanted += [
            sum((gamma * lam) ** k * d for k, d in enumerate(surprises[t:])) for t in range(len(r))
        ]
    torch.testing.assert_close(actual, doubles(wanted), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(returns, doubles(wanted) + values, rtol=1e-12, atol=1e-12)


def test_half_precision_is_computed_in_float32() -> None:
    """A thousand rewards of 0.01 do not add up in bfloat16: the sum stops at 4."""
    rewards = torch.full((1000,), 0.01, dtype=torch.bfloat16)
    actual = advantages.discounted(rewards, torch.tensor([1000]), 1.0)
    assert float(actual[0]) == pytest.approx(1000 * float(rewards[0]), rel=1e-5)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and group numbers: groups of 2 to 5 members in any order."""
    sizes = draw(st.lists(st.integers(2, 5), min_size=1, max_size=4))
    names = draw(st.permutations([7 * g + 3 for g, size in enumerate(sizes) for _ in range(size)]))
    numbers = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3))
    scores = draw(st.lists(numbers, min_size=len(names), max_size=len(names)))
    return doubles(scores), torch.tensor(names)


@few
@given(grouped())
def test_group_estimates_are_their_formulas(data: tuple[torch.Tensor, torch.Tensor]) -> None:
    scores, groups = data
    actual = torch.stack([estimate(*data) for estimate in IN_GROUPS], dim=1).tolist()
    for i, score in enumerate(scores.tolist()):
        members = [j for j in range(len(groups)) if groups[j] == groups[i]]
        own = [float(scores[j]) for j in members]
        centered, deviation = score - statistics.fmean(own), statistics.stdev(own)
        left_out = score - statistics.fmean(float(scores[j]) for j in members if j != i)
        wanted = [centered, centered / deviation if deviation else 0.0, left_out]
        assert actual[i] == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("scores", [[0.1], [0.1] * 3, [0.7, 0.7 + 6e-8, 0.7]])
def test_scores_that_differ_by_rounding_alone_have_no_signal(scores: list[float]) -> None:
    """In floating point the mean of three times 0.1 is not 0.1."""
    groups = torch.zeros(len(scores), dtype=torch.int64)
    actual = advantages.group_normalized(torch.tensor(scores), groups)
    assert actual.tolist() == [0.0] * len(scores)
    assert advantages.whiten(torch.tensor(scores)).tolist() == [0.0] * len(scores)


LENGTHS = torch.tensor([3, 1, 2, 4])
SCORES, CENTERED = doubles([1.0, 0.0, 2.0, -1.0]), doubles([0.5, -0.5, 1.5, -1.5])
COEF = 0.1
OLD, REFERENCE, VALUES = -drawn(10, 0).abs(), -drawn(10, 1).abs(), drawn(10, 2)
BATCH = Experience(
    lengths=LENGTHS,
    groups=torch.tensor([0, 0, 1, 1]),
    rewards=SCORES,
    truncated=torch.zeros(4, dtype=torch.bool),
    old=OLD,
    sampled=OLD,
    reference=REFERENCE,
    values=VALUES,
    kl_coef=COEF,
)


def wanted_of(name: str, rewards: torch.Tensor, loop: Loop) -> torch.Tensor:
    """The papers' formulas of tokens' rewards, of what is compared with loops above."""
    if name == "ppo":
        how = {"gamma": loop.gamma, "lam": loop.gae_lambda}
        return advantages.whiten(advantages.gae(rewards, VALUES, LENGTHS, **how)[0])
    if name.startswith("reinforce_pp"):
        means = advantages.on_last_token(SCORES - CENTERED, LENGTHS)
        rewards = rewards if name == "reinforce_pp" else rewards - means
        return advantages.whiten(advantages.discounted(rewards, LENGTHS, loop.gamma))
    of_groups = {"dr_grpo": advantages.group_centered, "rloo": advantages.leave_one_out}
    estimate = of_groups.get(name, advantages.group_normalized)
    raw = advantages.spread(estimate(advantages.sums(rewards, LENGTHS), BATCH.groups), LENGTHS)
    return advantages.whiten(raw) if name == "rloo" else raw


@pytest.mark.parametrize("name", ALGORITHMS)
def test_algorithms_equal_their_formulas(name: str) -> None:
    plain = advantages.on_last_token(SCORES, LENGTHS)
    kl = doubles([KL["k3"](gap) for gap in (OLD - REFERENCE).tolist()])
    for where, rewards in (("loss", plain), ("reward", plain - COEF * kl)):
        whiten = name in ("ppo", "rloo")
        loop = Loop(kl_coef=COEF, gamma=0.9, gae_lambda=0.8, whiten=whiten, kl_in=where)
        actual, returns = advantages.estimate(ALGORITHMS[name].estimate, BATCH, loop)
        torch.testing.assert_close(actual, wanted_of(name, rewards, loop), rtol=1e-10, atol=1e-12)
        assert (returns is not None) == ALGORITHMS[name].critic == (name == "ppo")


def test_defaults_are_accepted_and_options_that_cannot_work_are_refused_together() -> None:
    for name in ALGORITHMS:
        assert not list(findings(name, replace(Loop(), **DEFAULTS[name])))
    assert not list(findings("ppo", Loop(num_generations=1)))
    refused = findings("grpo", Loop(num_generations=1, dual_clip=1.2))
    assert [each.override for each in refused] == ["rl.num_generations=8", "rl.dual_clip=3.2"]
