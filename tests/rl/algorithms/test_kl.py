"""Estimators of the KL to the reference: values and average gradients; and the controllers."""

from __future__ import annotations

import math

import pytest
import torch

from tasks.rl.algorithms import kl
from tests.settings import Loop

POLICY = torch.tensor([0.3, -0.8, 1.1, 0.0, -1.5], dtype=torch.float64)
OTHER = torch.tensor([-0.2, 0.5, 0.9, -1.0, 0.4], dtype=torch.float64)
"""Logits of two distributions over five tokens."""


def divergence(p_logits: torch.Tensor, q_logits: torch.Tensor) -> torch.Tensor:
    """KL(p || q), summed over all tokens."""
    p, q = p_logits.log_softmax(0), q_logits.log_softmax(0)
    return (p.exp() * (p - q)).sum()


def average(estimator: str) -> tuple[float, torch.Tensor]:
    """Mean of an estimate and its gradient over the policy's distribution: exact, not sampled."""
    logits = POLICY.clone().requires_grad_()
    each = kl.estimate(logits.log_softmax(0), OTHER.log_softmax(0), estimator)
    probability = POLICY.softmax(0)
    mean = (probability * each).sum()
    return float(mean.detach()), gradient(mean, logits)


def gradient(of: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(of, logits)[0]


@pytest.mark.parametrize(
    ("estimator", "formula"),
    [("k1", lambda d: d), ("k2", lambda d: d * d / 2), ("k3", lambda d: math.exp(-d) - 1 + d)],
)
def test_estimates_equal_their_formulas(estimator: str, formula: object) -> None:
    assert callable(formula)
    logprobs, reference = POLICY.log_softmax(0), OTHER.log_softmax(0)
    actual = kl.estimate(logprobs, reference, estimator).tolist()
    wanted = [formula(float(p - q)) for p, q in zip(logprobs, reference, strict=True)]
    assert actual == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str) -> None:
    assert average(estimator)[0] == pytest.approx(float(divergence(POLICY, OTHER)), rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_k1_and_k2_have_the_gradient_of_the_kl(estimator: str) -> None:
    """The naive derivative of k1 averages to zero and would have no effect in a loss."""
    logits = POLICY.clone().requires_grad_()
    wanted = gradient(divergence(logits, OTHER), logits)
    torch.testing.assert_close(average(estimator)[1], wanted, rtol=1e-10, atol=1e-12)
    assert float(wanted.abs().max()) > 0.1


def test_k3_has_the_gradient_of_the_reverse_kl() -> None:
    logits = POLICY.clone().requires_grad_()
    wanted = gradient(divergence(OTHER, logits), logits)
    torch.testing.assert_close(average("k3")[1], wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("nats", [14.0, 34.5])
def test_one_extreme_token_does_not_decide(nats: float) -> None:
    """Without the clamps 14 nats are 294 nats per token over 4,096, and 34.5 a gradient of 1e15."""
    reference = torch.zeros(4096, dtype=torch.float64)
    policy = reference.clone()
    policy[7] = -nats
    policy.requires_grad_()
    mean = kl.estimate(policy, reference, "k3").mean()
    assert float(mean.detach()) == pytest.approx(10 / 4096)
    mean.backward()
    assert policy.grad is not None
    assert float(policy.grad.abs().max()) == 0.0


def test_the_fixed_coefficient_stays() -> None:
    controller = kl.Controller.of(Loop(kl_coef=0.3))
    assert controller.after(99.0, 1000).coef == 0.3


@pytest.mark.parametrize(
    ("measured", "responses", "factor"),
    [
        (0.02, 100, 1.0),  # on target
        (0.021, 100, 1.05),  # a miss of 5 %, over one horizon
        (0.5, 100, 1.2),  # cut off
        (0.0, 100, 0.8),
        (0.5, 50, 1.2**0.5),
        (0.0, 1000, 0.8**10),  # a whole iteration of ten horizons, and still positive
    ],
)
def test_the_adaptive_coefficient_moves_by_the_relative_error(
    measured: float, responses: int, factor: float
) -> None:
    controller = kl.Controller.of(Loop(kl_coef=0.1, kl_target=0.02, kl_horizon=100))
    assert controller.after(measured, responses).coef == pytest.approx(0.1 * factor, rel=1e-12)
    assert controller.coef == 0.1


@pytest.mark.parametrize(
    "loop", [Loop(kl_coef=0.1), Loop(kl_coef=0.1, kl_target=0.02, kl_horizon=100)]
)
def test_controllers_resume_from_a_checkpoint(loop: Loop) -> None:
    moved = kl.Controller.of(loop).after(0.5, 70)
    assert kl.Controller.of(loop, moved.as_dict()) == moved
    former = {"kind": "adaptive", "coef": 0.7, "target": 0.02, "horizon": 100}
    assert kl.Controller.of(loop, former).coef == 0.7
