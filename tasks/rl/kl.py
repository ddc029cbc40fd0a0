"""KL to the reference: estimators from samples, and the coefficient that follows a target."""

from __future__ import annotations

import torch

from tasks.rl.settings import Loop

LARGEST_ERROR = 0.2
"""Clip of the relative error in `adapted` (arXiv:1909.08593, 2.2)."""


def estimate_kl(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy || reference) of each token, in nats, from tokens that the policy sampled.

    J. Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). With policy p,
    reference q and d = log p - log q:

        k1 = d                  unbiased for KL(p || q), of either sign
        k2 = d^2 / 2            biased, positive, of low variance
        k3 = exp(-d) - 1 + d    unbiased, positive, of low variance; at most 10 nats here

    In a loss the derivative counts, not the value. The derivative of k1 is zero on average, so k1
    gets the derivative d * grad log p instead. Its average is the gradient of KL(p || q); k2 has it
    by itself. k3 keeps its own derivative, as in GRPO (arXiv:2402.03300, eq. 4): its average is the
    gradient of KL(q || p), which has the same minimum.
    """
    log_ratio = logprobs - reference
    if estimator == "k3":
        # Clamps as in verl's core_algos.py: without them one token of 34 nats outweighs a batch.
        log_ratio = log_ratio.clamp(-20, 20)
        return (torch.expm1(-log_ratio) + log_ratio).clamp(max=10)
    half_square = log_ratio.square() / 2
    if estimator == "k2":
        return half_square
    assert estimator == "k1", estimator
    return log_ratio.detach() + half_square - half_square.detach()


def adapted(coef: float, kl: float, responses: int, loop: Loop) -> float:
    """Return the KL coefficient after an iteration with this KL, in nats per token.

    Without `rl.kl_target` it is constant. Else the proportional controller of arXiv:1909.08593,
    2.2, eq. 4: the relative error e = kl / target - 1, clipped to +-0.2, multiplies it by
    (1 + e)^(responses / horizon), of which the paper's factor is the first-order approximation.
    """
    if loop.kl_target is None:
        return coef
    error = min(max(kl / loop.kl_target - 1, -LARGEST_ERROR), LARGEST_ERROR)
    return float(coef * (1 + error) ** (responses / loop.kl_horizon))
