"""KL to the reference: estimators from samples, and the controller of its coefficient.

J. Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). For a token
sampled from the policy p, with the reference q and d = log p - log q:

    k1 = d                  unbiased for KL(p || q), of either sign
    k2 = d^2 / 2            biased, positive, of low variance
    k3 = exp(-d) - 1 + d    unbiased, positive, of low variance; at most 10 nats here

In a loss the derivative counts, not the value. The derivative of k1 is zero on average, so
`estimate` gives k1 the derivative d * grad log p instead. Its average is the gradient of KL(p ||
q); k2 has it by itself. k3 keeps its own derivative, as in GRPO (arXiv:2402.03300, eq. 4): its
average is the gradient of KL(q || p), which has the same minimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, get_args

import torch

from tasks.config.choices import KlEstimator

if TYPE_CHECKING:
    from tasks.rl.settings import Loop

LARGEST_ERROR = 0.2
"""Clip of the relative error in `Controller` (arXiv:1909.08593, 2.2)."""


def estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimate KL(policy || reference) of each token, in nats, with the gradient described above.

    Args:
        logprobs: log-probabilities by the policy, which sampled the tokens; any shape.
        reference: log-probabilities of the same tokens by the reference, same shape.
        estimator: k1, k2 or k3.

    Raises:
        ValueError: unknown estimator.
    """
    log_ratio = logprobs - reference
    if estimator == "k3":
        # Clamps as in verl's core_algos.py: without them one token of 34 nats outweighs a batch.
        log_ratio = log_ratio.clamp(-20, 20)
        return (torch.expm1(-log_ratio) + log_ratio).clamp(max=10)
    if estimator not in get_args(KlEstimator):
        raise ValueError(
            f"kl estimator {estimator!r}: there are {', '.join(get_args(KlEstimator))}"
        )
    half_square = log_ratio.square() / 2
    if estimator == "k2":
        return half_square
    return log_ratio.detach() + half_square - half_square.detach()


@dataclass(frozen=True)
class Controller:
    """The KL coefficient of an iteration: constant, or adapted to keep the KL near a target.

    Adaptive is the proportional controller of arXiv:1909.08593, 2.2, eq. 4: the relative error
    e = kl / target - 1, clipped to +-0.2, multiplies the coefficient by
    (1 + e)^(responses / horizon). The paper's factor 1 + e * responses / horizon is its first-order
    approximation. The power is always positive, and two iterations have the effect of one of twice
    the size.

    Attributes:
        coef: the coefficient.
        target: nats per token; None: the coefficient is constant.
        horizon: responses in which the coefficient changes by at most a fifth.
    """

    coef: float
    target: float | None
    horizon: int

    @classmethod
    def of(cls, loop: Loop, saved: Mapping[str, Any] | None = None) -> Controller:
        """Return the controller of section `rl`; `saved`: state of a checkpoint to continue."""
        return cls((saved or {"coef": loop.kl_coef})["coef"], loop.kl_target, loop.kl_horizon)

    def after(self, kl: float, responses: int) -> Controller:
        """Return the controller of the next iteration.

        Args:
            kl: nats per token, measured in this iteration.
            responses: number of responses of this iteration, over all ranks.
        """
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        return replace(self, coef=self.coef * (1 + error) ** (responses / self.horizon))

    def as_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"coef": self.coef}
