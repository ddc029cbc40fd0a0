"""The formulas together solve a bandit: signs and factors are right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tasks.config.defaults import ALGORITHMS as DEFAULTS
from tasks.rl.algorithms.batch import Batch, Totals
from tasks.rl.algorithms.policy_loss import LossInputs
from tasks.rl.algorithms.registry import ALGORITHMS, recipe
from tasks.rl.algorithms.value_loss import value_loss
from tests.settings import Loop


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
