"""The formulas together solve a bandit: signs and factors are right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tasks.rl.algorithms.batch import Batch, Totals
from tasks.rl.algorithms.policy_loss import LossInputs
from tasks.rl.algorithms.registry import recipe
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
