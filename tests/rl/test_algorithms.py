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


def wanted_of(name: str, rewards: torch.Tensor, loop: Loop) -> torch.Tensor:
    """The papers' formulas of tokens' rewards, of what `test_advantages.py` compares with loops."""
    of_groups = {
        "dr_grpo": advantages.group_centered,
        "rloo": advantages.leave_one_out,
    }
    if name == "ppo":
        assert BATCH.values is not None
        raw, _ = advantages.gae(
            rewards, BATCH.values, LENGTHS, gamma=loop.gamma, lam=loop.gae_lambda
        )
    elif name.startswith("reinforce_pp"):
        means = advantages.on_last_token(SCORES - CENTERED, LENGTHS)
        rewards = rewards if name == "reinforce_pp" else rewards - means
        return advantages.whiten(advantages.returns_to_go(rewards, LENGTHS, gamma=loop.gamma))
    else:
        estimate = of_groups.get(name, advantages.group_normalized)
        raw = advantages.spread(estimate(advantages.sums(rewards, LENGTHS), GROUPS), LENGTHS)
    return advantages.whiten(raw) if loop.whiten else raw


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_equal_their_formulas(name: str) -> None:
    whiten = name in ("ppo", "rloo")
    for estimator in ("k1", "k3", None):
        rewards = advantages.on_last_token(SCORES, LENGTHS)
        kl: dict[str, Any] = {"kl_in": "loss"}
        if estimator is not None:
            assert BATCH.old is not None
            assert BATCH.reference is not None
            gaps = (BATCH.old - BATCH.reference).tolist()
            distances = torch.tensor([KL[estimator](gap) for gap in gaps], dtype=torch.float64)
            rewards, kl = rewards - COEF * distances, {"kl_in": "reward", "kl_estimator": estimator}
        loop = Loop(kl_coef=COEF, gamma=0.9, gae_lambda=0.8, whiten=whiten, **kl)
        actual, returns = advantages.estimate(ALGORITHMS[name].estimate, BATCH, loop)
        wanted = wanted_of(name, rewards, loop)
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
