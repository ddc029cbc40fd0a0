"""Each algorithm's advantages compared with the papers' formulas, and the options it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tasks.config.defaults import ALGORITHMS as DEFAULTS
from tasks.core.errors import ConfigError
from tasks.rl.algorithms import advantages
from tasks.rl.algorithms.algorithm_options import TERMS
from tasks.rl.algorithms.batch import Batch
from tasks.rl.algorithms.registry import ALGORITHMS, recipe
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


BATCH = Batch(
    lengths_S=LENGTHS,
    groups_S=GROUPS,
    scores_S=SCORES,
    old_N=-drawn(0).abs(),
    sampled_N=-drawn(0).abs(),
    reference_N=-drawn(1).abs(),
    values_N=drawn(2),
    kl_coef=COEF,
)


def rewards(scores: torch.Tensor, estimator: str | None) -> torch.Tensor:
    """Rewards of every token; without KL if the estimator is None."""
    each = advantages.on_last_token(scores, LENGTHS)
    if estimator is not None:
        assert BATCH.reference_N is not None
        gaps = (BATCH.old_N - BATCH.reference_N).tolist()
        each = each - COEF * torch.tensor([KL[estimator](gap) for gap in gaps], dtype=each.dtype)
    return each


def in_groups(estimate: Any, estimator: str | None) -> torch.Tensor:
    """Estimates of the sums of rewards, for all tokens."""
    penalised = advantages.sums(rewards(SCORES, estimator), LENGTHS)
    return advantages.spread(estimate(penalised, GROUPS), LENGTHS)


def wanted_of(name: str, estimator: str | None, loop: Loop) -> torch.Tensor:
    """The papers' formulas, composed of what `test_advantages.py` compares with plain loops."""
    if name == "ppo":
        each, values = rewards(SCORES, estimator), BATCH.values_N
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


def loop_for(name: str, **knobs: object) -> Loop:
    """Section `rl` with every option that the algorithm uses changed from its default."""
    moved: dict[str, object] = {"gamma": 0.9, "gae_lambda": 0.8, "whiten": True, "refill": 1}
    known = {k: v for k, v in moved.items() if k in TERMS[name].uses}
    made: Loop = replace(Loop(kl_coef=COEF), **(known | knobs))  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_equal_their_formulas(name: str) -> None:
    for estimator in (None, "k1", "k2", "k3"):
        where = {"kl_in": "loss"} if estimator is None else {"kl_estimator": estimator}
        loop = loop_for(name, **{"kl_in": "reward", **where})
        actual = recipe(name, loop).advantages(BATCH, loop)
        wanted = wanted_of(name, estimator, loop)
        torch.testing.assert_close(actual.advantages_N, wanted, rtol=1e-10, atol=1e-12)
        assert (actual.returns_N is not None) == ALGORITHMS[name].critic == (name == "ppo")


def test_whitening_leaves_the_critics_returns_alone() -> None:
    plain, whitened = loop_for("ppo", whiten=False), loop_for("ppo", whiten=True)
    returns = [recipe("ppo", loop).advantages(BATCH, loop).returns_N for loop in (plain, whitened)]
    assert torch.equal(*returns)


def test_equal_rewards_leave_only_the_kl() -> None:
    """No NaN from 0 / 0, and exactly zero for numbers that are not binary fractions."""
    same = replace(BATCH, scores_S=torch.full((4,), 0.1, dtype=torch.float32), values_N=None)
    critic = replace(same, values_N=torch.full((COUNT,), 0.1, dtype=torch.float32))
    for name in ALGORITHMS:
        loop, batch = (Loop(gae_lambda=1.0), critic) if name == "ppo" else (Loop(), same)
        assert recipe(name, loop).advantages(batch, loop).advantages_N.tolist() == [0.0] * COUNT


def test_the_loss_gets_the_options_of_the_section() -> None:
    loop = Loop(
        clip_low=0.1, clip_high=0.3, dual_clip=4.0, kl_coef=0.2, kl_estimator="k2",
        entropy_coef=0.01,
    )  # fmt: skip
    in_reward = replace(loop, kl_in="reward")
    for name in ALGORITHMS:
        loss = recipe(name, loop).policy_loss(loop)
        assert (loss.clip_low, loss.clip_high, loss.dual_clip) == (0.1, 0.3, 4.0)
        assert (loss.kl_coef, loss.kl_estimator, loss.entropy_coef) == (0.2, "k2", 0.01)
        assert recipe(name, loop).policy_loss(loop, kl_coef=0.7).kl_coef == 0.7
        assert recipe(name, in_reward).policy_loss(in_reward, kl_coef=0.7).kl_coef == 0.0
        assert recipe(name, replace(Loop(), **DEFAULTS[name])) is ALGORITHMS[name]


def test_options_that_cannot_work_are_refused() -> None:
    refused: list[tuple[str, dict[str, Any], str]] = [
        ("grpo", {"gae_lambda": 0.9}, "rl.gae_lambda=0.95"),
        ("dr_grpo", {"whiten": True}, "rl.whiten=false"),
        ("gspo", {"critic": "separate"}, "rl.critic=shared"),
        ("rloo", {"critic_warmup": 3}, "rl.critic_warmup=0"),
        ("reinforce_pp_baseline", {"value_clip": None}, "rl.value_clip=0.2"),
        ("ppo", {"refill": 1}, "rl.refill=0"),
        ("ppo", {"dual_clip": 1.2}, "rl.dual_clip"),
        ("ppo", {"kl_target": 0.02}, "rl.kl_coef="),
        ("ppo", {"overlong_buffer": 8}, "rl.overlong"),
    ]
    for name, algorithm in ALGORITHMS.items():
        if algorithm.groups:  # a group of one has nothing to be compared with
            refused.append((name, {"num_generations": 1}, "rl.num_generations=8"))
        else:
            assert recipe(name, Loop(num_generations=1)).name == name
    for name, knobs, instead in refused:
        with pytest.raises(ConfigError, match=instead):
            recipe(name, replace(Loop(), **knobs))
    with pytest.raises(ConfigError) as caught:
        recipe("grpo", Loop(num_generations=1, gae_lambda=0.5, gamma=0.9, kl_target=1.0))
    assert [line.partition(" -> ")[2] for line in caught.value.details] == [
        "rl.gae_lambda=0.95", "rl.gamma=1.0", "rl.num_generations=8", "rl.kl_coef=0.05"
    ]  # fmt: skip
