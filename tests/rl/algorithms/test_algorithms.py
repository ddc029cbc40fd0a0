"""Each algorithm's advantages compared with the papers' formulas, and the options it refuses."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from tasks.config.defaults import ALGORITHMS as DEFAULTS
from tasks.core.errors import ConfigError
from tasks.rl.algorithms.algorithm_options import TERMS
from tasks.rl.algorithms.batch import Batch
from tasks.rl.algorithms.registry import ALGORITHMS, recipe
from tests.settings import Loop

LENGTHS = [3, 1, 2, 4]
GROUPS = [0, 0, 1, 1]
SCORES = [1.0, 0.0, 2.0, -1.0]
COEF = 0.1
COUNT = sum(LENGTHS)
STARTS = [0, 3, 4, 6]


def drawn(seed: int) -> torch.Tensor:
    return torch.randn(COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


BATCH = Batch(
    lengths_S=torch.tensor(LENGTHS),
    groups_S=torch.tensor(GROUPS),
    scores_S=torch.tensor(SCORES, dtype=torch.float64),
    old_N=-drawn(0).abs(),
    sampled_N=-drawn(0).abs(),
    reference_N=-drawn(1).abs(),
    values_N=drawn(2),
    kl_coef=COEF,
)


def distances(estimator: str) -> list[list[float]]:
    """KL estimates of every token, by response."""
    assert BATCH.reference_N is not None
    gaps = (BATCH.old_N - BATCH.reference_N).tolist()
    formula = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-d) - 1 + d,
    }[estimator]
    return [
        [formula(d) for d in gaps[start : start + length]]
        for start, length in zip(STARTS, LENGTHS, strict=True)
    ]


def rewards(scores: list[float], estimator: str | None) -> list[list[float]]:
    """Rewards of every token, by response; without KL if the estimator is None."""
    every = []
    for response, score in enumerate(scores):
        each = [0.0] * LENGTHS[response]
        if estimator is not None:
            each = [-COEF * d for d in distances(estimator)[response]]
        each[-1] += score
        every.append(each)
    return every


def penalised(estimator: str | None) -> list[float]:
    return [sum(each) for each in rewards(SCORES, estimator)]


def for_all_tokens(numbers: list[float]) -> list[float]:
    return [x for x, length in zip(numbers, LENGTHS, strict=True) for _ in range(length)]


def whitened(numbers: list[float]) -> list[float]:
    mean, deviation = statistics.fmean(numbers), statistics.stdev(numbers)
    return [(x - mean) / deviation for x in numbers]


def returns(each: list[list[float]], gamma: float) -> list[float]:
    return [
        sum(gamma**k * r for k, r in enumerate(response[t:]))
        for response in each
        for t in range(len(response))
    ]


def ppo(estimator: str | None, loop: Loop) -> list[float]:
    assert BATCH.values_N is not None
    actual = []
    for each, start in zip(rewards(SCORES, estimator), STARTS, strict=True):
        values = [*BATCH.values_N[start : start + len(each)].tolist(), 0.0]
        advantage, backwards = 0.0, []
        for t in reversed(range(len(each))):
            surprise = each[t] + loop.gamma * values[t + 1] - values[t]
            advantage = surprise + loop.gamma * loop.gae_lambda * advantage
            backwards.append(advantage)
        actual += backwards[::-1]
    return whitened(actual) if loop.whiten else actual


def grpo(estimator: str | None, loop: Loop) -> list[float]:
    a, b, c, d = penalised(estimator)
    return for_all_tokens(whitened([a, b]) + whitened([c, d]))


def dr_grpo(estimator: str | None, loop: Loop) -> list[float]:
    a, b, c, d = penalised(estimator)
    return for_all_tokens([(a - b) / 2, (b - a) / 2, (c - d) / 2, (d - c) / 2])


def rloo(estimator: str | None, loop: Loop) -> list[float]:
    a, b, c, d = penalised(estimator)
    actual = for_all_tokens([a - b, b - a, c - d, d - c])
    return whitened(actual) if loop.whiten else actual


def reinforce_pp(estimator: str | None, loop: Loop) -> list[float]:
    return whitened(returns(rewards(SCORES, estimator), loop.gamma))


def reinforce_pp_baseline(estimator: str | None, loop: Loop) -> list[float]:
    return whitened(returns(rewards([0.5, -0.5, 1.5, -1.5], estimator), loop.gamma))


FORMULAS = {
    "ppo": ppo,
    "grpo": grpo,
    "gspo": grpo,
    "dapo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
}


def loop_for(name: str, **knobs: object) -> Loop:
    """Section `rl` with every option that the algorithm uses changed from its default."""
    moved: dict[str, object] = {"gamma": 0.9, "gae_lambda": 0.8, "whiten": True, "refill": 1}
    known = {k: v for k, v in moved.items() if k in TERMS[name].uses}
    made: Loop = replace(Loop(kl_coef=COEF), **(known | knobs))  # type: ignore[arg-type]
    return made


def test_every_algorithm_has_a_formula_here() -> None:
    assert set(FORMULAS) == set(ALGORITHMS) == set(TERMS) == set(DEFAULTS)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_advantages_equal_their_formulas(name: str) -> None:
    for estimator in (None, "k1", "k2", "k3"):
        where = {"kl_in": "loss"} if estimator is None else {"kl_estimator": estimator}
        loop = loop_for(name, **{"kl_in": "reward", **where})
        actual = recipe(name, loop).advantages(BATCH, loop)
        wanted = torch.tensor(FORMULAS[name](estimator, loop), dtype=torch.float64)
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


def test_losses_of_the_algorithms() -> None:
    actual = {
        name: (TERMS[name].ratio, TERMS[name].aggregate, algorithm.groups)
        for name, algorithm in ALGORITHMS.items()
    }
    assert actual == {
        "ppo": ("token", "tokens", False),
        "grpo": ("token", "sequences", True),
        "dapo": ("token", "tokens", True),
        "dr_grpo": ("token", "constant", True),
        "rloo": ("token", "tokens", True),
        "reinforce_pp": ("token", "tokens", False),
        "reinforce_pp_baseline": ("token", "tokens", True),
        "gspo": ("sequence", "sequences", True),
    }


@pytest.mark.parametrize(
    ("name", "knobs", "instead"),
    [
        ("grpo", {"gae_lambda": 0.9}, "rl.gae_lambda=0.95"),
        ("grpo", {"gamma": 0.99}, "rl.gamma=1.0"),
        ("dr_grpo", {"whiten": True}, "rl.whiten=false"),
        ("gspo", {"critic": "separate"}, "rl.critic=shared"),
        ("rloo", {"critic_warmup": 3}, "rl.critic_warmup=0"),
        ("rloo", {"critic_lr": 1e-3}, "rl.critic_lr=null"),
        ("reinforce_pp", {"refill": 2}, "rl.refill=0"),
        ("reinforce_pp_baseline", {"value_clip": None}, "rl.value_clip=0.2"),
        ("ppo", {"refill": 1}, "rl.refill=0"),
        ("ppo", {"dual_clip": 1.2}, "rl.dual_clip"),
        ("ppo", {"kl_target": 0.02}, "rl.kl_coef="),
        ("ppo", {"overlong_buffer": 8}, "rl.overlong"),
        ("ppo", {"overlong_penalty": 1.0}, "rl.overlong"),
    ],
)
def test_options_that_cannot_work_are_refused(
    name: str, knobs: dict[str, Any], instead: str
) -> None:
    with pytest.raises(ConfigError, match=f" -> .*{instead}"):
        recipe(name, replace(Loop(), **knobs))


def test_a_group_of_one_is_refused_where_groups_are_compared() -> None:
    for name in ALGORITHMS:
        if ALGORITHMS[name].groups:
            with pytest.raises(ConfigError, match="rl.num_generations=8"):
                recipe(name, Loop(num_generations=1))
        else:
            assert recipe(name, Loop(num_generations=1)).name == name


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        recipe("grpo", Loop(num_generations=1, gae_lambda=0.5, gamma=0.9, kl_target=1.0))
    assert [line.partition(" -> ")[2] for line in caught.value.details] == [
        "rl.gae_lambda=0.95", "rl.gamma=1.0", "rl.num_generations=8", "rl.kl_coef=0.05"
    ]  # fmt: skip
