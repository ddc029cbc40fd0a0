"""The formulas together solve a bandit and a copying task: signs and factors are right.

Plain PyTorch in one process; the policy has a few thousand parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from tasks.config.defaults import ALGORITHMS as DEFAULTS
from tasks.rl.algorithms import correction
from tasks.rl.algorithms.batch import Batch, Totals
from tasks.rl.algorithms.policy_loss import LossInputs
from tasks.rl.algorithms.registry import ALGORITHMS, Recipe, recipe
from tasks.rl.algorithms.value_loss import value_loss
from tests.settings import Loop

NAMED = ("ppo", "grpo", "rloo", "reinforce_pp")
"""The other algorithms differ in parts that `test_algorithms.py` and `test_policy_loss.py` test."""
EVERY = [pytest.param(name, marks=() if name in NAMED else pytest.mark.slow) for name in ALGORITHMS]
LETTERS = 4
END = LETTERS
LIMIT = 4
"""The task is to copy two letters and end: three tokens of at most four."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def state_of(prompts_S2: torch.Tensor, tokens_S: torch.Tensor, place: int) -> torch.Tensor:
    """Features for policy and critic before a token: prompt, position, previous token."""
    parts = [
        nn.functional.one_hot(prompts_S2, LETTERS).flatten(1),
        nn.functional.one_hot(torch.full_like(tokens_S, place), LIMIT),
        nn.functional.one_hot(tokens_S, LETTERS + 1),
    ]
    return torch.cat(parts, dim=1).float()


def network(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(17, 128), nn.ReLU(), nn.Linear(128, outputs))


@dataclass(frozen=True)
class Rolled:
    """Responses to the prompts: S responses, N tokens, F features before each token."""

    states_NF: torch.Tensor
    tokens_N: torch.Tensor
    lengths_S: torch.Tensor
    scores_S: torch.Tensor
    exact: float


@torch.no_grad()
def roll_out(policy: nn.Module, prompts_S2: torch.Tensor) -> Rolled:
    """Sample one response per prompt; its score is the share of correct positions."""
    before_S = torch.full((len(prompts_S2),), END)
    alive_S = torch.ones(len(prompts_S2), dtype=torch.bool)
    states, tokens, alive = [], [], []
    for place in range(LIMIT):
        states.append(state_of(prompts_S2, before_S, place))
        before_S = torch.distributions.Categorical(logits=policy(states[-1])).sample()
        tokens.append(before_S)
        alive.append(alive_S)
        alive_S = alive_S & (before_S != END)
    tokens_SL, alive_SL = torch.stack(tokens, 1), torch.stack(alive, 1)
    wanted_S3 = torch.cat([prompts_S2, torch.full((len(prompts_S2), 1), END)], dim=1)
    right_S3 = (tokens_SL[:, :3] == wanted_S3) & alive_SL[:, :3]
    return Rolled(
        states_NF=torch.stack(states, 1)[alive_SL],
        tokens_N=tokens_SL[alive_SL],
        lengths_S=alive_SL.sum(1),
        scores_S=right_S3.float().mean(1),
        exact=float(right_S3.all(1).float().mean()),
    )


class Copier:
    """One run of an algorithm on the copying task."""

    def __init__(self, chosen: Recipe, loop: Loop) -> None:
        torch.manual_seed(0)
        self.recipe, self.loop = chosen, loop
        self.policy, self.reference = network(LETTERS + 1), network(LETTERS + 1)
        self.reference.load_state_dict(self.policy.state_dict())
        self.critic = network(1) if chosen.critic else None
        parameters = [*self.policy.parameters(), *(self.critic or nn.Module()).parameters()]
        self.optimizer = torch.optim.Adam(parameters, lr=0.01)

    def iterate(self) -> float:
        """Sample, estimate, update; return the share of correct responses."""
        loop = self.loop
        prompts_S2 = torch.randint(LETTERS, (loop.rollout_batch_size, 2)).repeat_interleave(
            loop.num_generations, 0
        )
        rolled = roll_out(self.policy, prompts_S2)
        batch = self._batch(rolled)
        estimated = self.recipe.advantages(batch, loop)
        weights_N = correction.weights(
            batch.old_N, batch.sampled_N, batch.lengths_S, kind="tis", high=2.0, low=0.5
        )
        owner_N = torch.arange(len(prompts_S2)).repeat_interleave(rolled.lengths_S)
        for _ in range(loop.ppo_epochs):
            self.optimizer.zero_grad()
            for half in (owner_N % 2 == 0, owner_N % 2 == 1):
                self._row(half, rolled, batch, estimated, weights_N, owner_N)
            self.optimizer.step()
        return rolled.exact

    def _batch(self, rolled: Rolled) -> Batch:
        with torch.no_grad():
            old_N = self._logprobs(self.policy, rolled)
            return Batch(
                lengths_S=rolled.lengths_S,
                groups_S=torch.arange(len(rolled.lengths_S)) // self.loop.num_generations,
                scores_S=rolled.scores_S,
                old_N=old_N,
                sampled_N=old_N,
                reference_N=self._logprobs(self.reference, rolled),
                values_N=None if self.critic is None else self.critic(rolled.states_NF)[:, 0],
                kl_coef=self.loop.kl_coef,
            )

    def _row(
        self,
        half: torch.Tensor,
        rolled: Rolled,
        batch: Batch,
        estimated: Any,
        weights_N: torch.Tensor,
        owner_N: torch.Tensor,
    ) -> None:
        """Add the gradient of one row, which has every second response."""
        assert batch.reference_N is not None
        part = replace(rolled, states_NF=rolled.states_NF[half], tokens_N=rolled.tokens_N[half])
        totals = Totals(len(owner_N), len(rolled.lengths_S), LIMIT)
        first = int(owner_N[half][0])
        inputs = LossInputs(
            old_n=batch.old_N[half],
            advantages_n=estimated.advantages_N[half],
            weights_n=weights_N[half],
            owner_n=owner_N[half] // 2,
            lengths_s=rolled.lengths_S[first::2],
            totals=totals,
            reference_n=batch.reference_N[half],
        )
        loss = self.recipe.policy_loss(self.loop)(self._logprobs(self.policy, part), inputs).value
        if self.critic is not None:
            assert batch.values_N is not None
            values_n = self.critic(part.states_NF)[:, 0]
            old_n, returns_n = batch.values_N[half], estimated.returns_N[half]
            loss = loss + value_loss(values_n, old_n, returns_n, totals, self.loop.value_clip).value
        loss.backward()

    @staticmethod
    def _logprobs(policy: nn.Module, rolled: Rolled) -> torch.Tensor:
        return policy(rolled.states_NF).log_softmax(1).gather(1, rolled.tokens_N[:, None])[:, 0]


@pytest.mark.parametrize("name", EVERY)
def test_copying_is_learned(name: str) -> None:
    """From 1 in 100 by chance to nearly always, with a small KL to the reference."""
    usual = Loop(**{**DEFAULTS[name], "clip_low": 0.2, "clip_high": 0.2})
    loop = replace(usual, rollout_batch_size=32, num_generations=8, ppo_epochs=2, kl_coef=0.002)
    copier = Copier(recipe(name, loop), loop)
    shares = [copier.iterate() for _ in range(30)]
    assert shares[0] < 0.1
    assert sum(shares[-5:]) / 5 > 0.9, shares


TEMPERATURE = 0.5
"""Weight of KL or entropy. The best policy for rewards r is q * exp(r / TEMPERATURE)."""
BOLTZMANN = 1 / (1 + math.exp(-1 / TEMPERATURE))
"""Probability of the arm that pays 1, if the other pays 0 and q is uniform: 0.881."""


def play(loop: Loop) -> float:
    """Return RLOO's final probability of the second of two arms, which pays 1; q is uniform."""
    torch.manual_seed(0)
    chosen, count = recipe("rloo", loop), loop.num_generations
    logits = torch.zeros(2, requires_grad=True)
    ones, even_N = torch.ones(count, dtype=torch.int64), torch.full((count,), math.log(0.5))
    shares = []
    for _ in range(60):
        arms_N = torch.distributions.Categorical(logits=logits.detach()).sample((count,))
        logprobs = logits.log_softmax(0)
        old_N = logprobs.detach()[arms_N]
        entropy_N = -(logprobs.exp() * logprobs).sum().expand(count)
        batch = Batch(ones, 0 * ones, arms_N.float(), old_N, old_N, even_N, None, loop.kl_coef)
        inputs = LossInputs(
            old_n=old_N,
            advantages_n=chosen.advantages(batch, loop).advantages_N,
            weights_n=torch.ones(count),
            owner_n=torch.arange(count),
            lengths_s=ones,
            totals=Totals(count, count, 1),
            reference_n=even_N,
            entropy_n=entropy_N,
        )
        loss = chosen.policy_loss(loop)(logprobs[arms_N], inputs).value
        (gradient,) = torch.autograd.grad(loss, logits)
        logits.data -= 1.5 * gradient
        shares.append(float(logits.detach().softmax(0)[1]))
    return sum(shares[-20:]) / 20


@pytest.mark.parametrize(
    ("knobs", "settles"),
    [
        ({}, 1.0),
        ({"entropy_coef": TEMPERATURE}, BOLTZMANN),
        ({"kl_coef": TEMPERATURE, "kl_in": "reward", "kl_estimator": "k1"}, BOLTZMANN),
        ({"kl_coef": TEMPERATURE, "kl_in": "loss", "kl_estimator": "k1"}, BOLTZMANN),
        ({"kl_coef": TEMPERATURE, "kl_in": "loss", "kl_estimator": "k2"}, BOLTZMANN),
        # The gradient of k3 is that of the reverse divergence: 1 / 4 + sqrt(5) / 4 here.
        ({"kl_coef": TEMPERATURE, "kl_in": "loss", "kl_estimator": "k3"}, 0.8090),
    ],
)
def test_a_bandit_settles_where_theory_says(knobs: dict[str, Any], settles: float) -> None:
    """Signs and weights of KL and entropy: a factor of two would give 0.73 or 0.98."""
    assert play(replace(Loop(num_generations=2048), **knobs)) == pytest.approx(settles, abs=0.01)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_better_arm_wins(name: str) -> None:
    """Noisy rewards, groups of eight, every algorithm with its own loss."""
    usual = Loop(**{**DEFAULTS[name], "clip_low": 0.2, "clip_high": 0.2})
    assert pull(name, replace(usual, rollout_batch_size=16, num_generations=8, kl_coef=0.0)) > 0.95


def pull(name: str, loop: Loop) -> float:
    """Two arms that pay 1 with probability 0.3 and 0.7: the share of the second after 40 steps."""
    torch.manual_seed(1)
    chosen, count = recipe(name, loop), loop.rollout_batch_size * loop.num_generations
    logits, value = torch.zeros(2, requires_grad=True), torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.Adam([logits, value], lr=0.1)
    ones, totals = torch.ones(count, dtype=torch.int64), Totals(count, count, 1)
    for _ in range(40):
        arms_N = torch.distributions.Categorical(logits=logits.detach()).sample((count,))
        scores_N = torch.bernoulli(0.3 + 0.4 * arms_N)
        old_N, values_N = logits.detach().log_softmax(0)[arms_N], value.detach().expand(count)
        groups_N = torch.arange(count) // loop.num_generations
        estimated = chosen.advantages(
            Batch(ones, groups_N, scores_N, old_N, old_N, None, values_N), loop
        )
        inputs = LossInputs(
            old_N, estimated.advantages_N, torch.ones(count), torch.arange(count), ones, totals
        )
        loss = chosen.policy_loss(loop)(logits.log_softmax(0)[arms_N], inputs).value
        if estimated.returns_N is not None:
            now_N = value.expand(count)
            loss = loss + value_loss(now_N, values_N, estimated.returns_N, totals, 0.2).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(logits.detach().softmax(0)[1])
