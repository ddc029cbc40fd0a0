"""Each algorithm's advantages compared with the papers' formulas, and the options it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tasks.config.defaults import ALGORITHMS as DEFAULTS
from tasks.core.errors import ConfigError
from tasks.rl import advantages
from tasks.rl.algorithms import ALGORITHMS, algorithm
from tasks.rl.experience import Experience
from tests.rl.making import KL
from tests.settings import Loop

LENGTHS = torch.tensor([3, 1, 2, 4])
GROUPS = torch.tensor([0, 0, 1, 1])
SCORES = torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=torch.float64)
CENTERED = torch.tensor([0.5, -0.5, 1.5, -1.5], dtype=torch.float64)
"""Scores less the mean of their group."""
COEF = 0.1
COUNT = int(LENGTHS.sum())


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


BATCH = Experience(
    lengths=LENGTHS,
    groups=GROUPS,
    rewards=SCORES,
    truncated=torch.zeros(4, dtype=torch.bool),
    old=-drawn(0).abs(),
    sampled=-drawn(0).abs(),
    reference=-drawn(1).abs(),
    values=drawn(2),
    kl_coef=COEF,
)


def estimated(
    name: str, loop: Loop, batch: Experience = BATCH
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return advantages.estimate(algorithm(name, loop).estimate, batch, loop)


def rewards(scores: torch.Tensor, estimator: str | None) -> torch.Tensor:
    """Rewards of every token; without KL if the estimator is None."""
    each = advantages.on_last_token(scores, LENGTHS)
    if estimator is not None:
        assert BATCH.old is not None
        assert BATCH.reference is not None
        gaps = (BATCH.old - BATCH.reference).tolist()
        each = each - COEF * torch.tensor([KL[estimator](gap) for gap in gaps], dtype=each.dtype)
    return each


def in_groups(estimate: Any, estimator: str | None) -> torch.Tensor:
    """Estimates of the sums of rewards, for all tokens."""
    penalised = advantages.sums(rewards(SCORES, estimator), LENGTHS)
    return advantages.spread(estimate(penalised, GROUPS), LENGTHS)


def wanted_of(name: str, estimator: str | None, loop: Loop) -> torch.Tensor:
    """The papers' formulas, composed of what `test_advantages.py` compares with plain loops."""
    if name == "ppo":
        each, values = rewards(SCORES, estimator), BATCH.values
        assert values is not None
        raw, _ = advantages.gae(each, values, LENGTHS, gamma=loop.gamma, lam=loop.gae_lambda)
    elif name == "dr_grpo":
        raw = in_groups(advantages.group_centered, estimator)
    elif name == "rloo":
        raw = in_groups(advantages.leave_one_out, estimator)
    elif name in ("reinforce_pp", "reinforce_pp_baseline"):
        scores = SCORES if name == "reinforce_pp" else CENTERED
        each = rewards(scores, estimator)
        return advantages.whiten(advantages.returns_to_go(each, LENGTHS, gamma=loop.gamma))
    else:
        raw = in_groups(advantages.group_normalized, estimator)
    return advantages.whiten(raw) if loop.whiten else raw


def loop_for(name: str, **knobs: Any) -> Loop:
    """Section `rl` with options changed from their defaults."""
    whiten = name in ("ppo", "rloo")
    return Loop(kl_coef=COEF, gamma=0.9, gae_lambda=0.8, whiten=whiten, **knobs)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_equal_their_formulas(name: str) -> None:
    for estimator in (None, "k1", "k2", "k3"):
        where = {"kl_in": "loss"} if estimator is None else {"kl_estimator": estimator}
        loop = loop_for(name, **{"kl_in": "reward", **where})
        actual, returns = estimated(name, loop)
        wanted = wanted_of(name, estimator, loop)
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-12)
        assert (returns is not None) == ALGORITHMS[name].critic == (name == "ppo")


def test_the_defaults_of_each_algorithm_are_accepted() -> None:
    for name, chosen in ALGORITHMS.items():
        assert algorithm(name, replace(Loop(), **DEFAULTS[name])) is chosen


def test_options_that_cannot_work_are_refused_together() -> None:
    for name, chosen in ALGORITHMS.items():
        if not chosen.groups:  # else a group of one has nothing to be compared with
            algorithm(name, Loop(num_generations=1))
    with pytest.raises(ConfigError) as caught:
        algorithm("grpo", Loop(num_generations=1, dual_clip=1.2))
    assert [line.partition(" -> ")[2] for line in caught.value.details] == [
        "rl.num_generations=8", "rl.dual_clip=3.2"
    ]  # fmt: skip
