"""KL to the reference: estimators from samples, and the controller of its coefficient.

J. Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). For a token
sampled from the policy p, with the reference q and d = log p - log q:

    k1 = d                  unbiased for KL(p || q), of either sign
    k2 = d^2 / 2            biased, positive, of low variance
    k3 = exp(-d) - 1 + d    unbiased, positive, of low variance

In a loss the derivative counts, not the value. The derivative of k1 is zero on average, so
`estimate` gives k1 the derivative d * grad log p instead. Its average is the gradient of KL(p ||
q); k2 has it by itself. k3 keeps its own derivative, as in GRPO (arXiv:2402.03300, eq. 4): its
average is the gradient of KL(q || p), which has the same minimum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from tasks.rl.algorithms.algorithm_options import KL_ESTIMATORS

if TYPE_CHECKING:
    from tasks.rl.settings import Loop

LARGEST_ERROR = 0.2
"""Clip of the relative error in `Adaptive` (arXiv:1909.08593, 2.2)."""


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
        return torch.expm1(-log_ratio) + log_ratio
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"kl estimator {estimator!r}: there are {', '.join(KL_ESTIMATORS)}")
    half_square = log_ratio.square() / 2
    if estimator == "k2":
        return half_square
    return log_ratio.detach() + half_square - half_square.detach()


class Controller(Protocol):
    """The KL coefficient of the coming iteration.

    Attributes:
        coef: the coefficient.
    """

    @property
    def coef(self) -> float:
        """The coefficient."""
        ...

    def after(self, kl: float, responses: int) -> Controller:
        """Return the controller of the next iteration."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, which `controller` reads."""
        ...


@dataclass(frozen=True)
class Fixed:
    """A constant coefficient."""

    coef: float

    def after(self, kl: float, responses: int) -> Fixed:
        """Return the same controller."""
        return self

    def as_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"kind": "fixed", **asdict(self)}


@dataclass(frozen=True)
class Adaptive:
    """Keeps the KL near a target: the proportional controller of arXiv:1909.08593, 2.2, eq. 4.

    The relative error e = kl / target - 1, clipped to +-0.2, multiplies the coefficient by
    (1 + e)^(responses / horizon). The paper's factor 1 + e * responses / horizon is its first-order
    approximation. The power is always positive, and two iterations have the effect of one of twice
    the size.

    Attributes:
        coef: the coefficient.
        target: nats per token.
        horizon: responses in which the coefficient changes by at most a fifth.
    """

    coef: float
    target: float
    horizon: int

    def after(self, kl: float, responses: int) -> Adaptive:
        """Return the controller of the next iteration.

        Args:
            kl: nats per token, measured in this iteration.
            responses: number of responses of this iteration, over all ranks.
        """
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        return replace(self, coef=self.coef * (1 + error) ** (responses / self.horizon))

    def as_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"kind": "adaptive", **asdict(self)}


def controller(loop: Loop, saved: Mapping[str, Any] | None = None) -> Controller:
    """Return the controller that section `rl` describes.

    Args:
        loop: the section.
        saved: state of a checkpointed controller to continue from, or None.

    Raises:
        KeyError: the state has an unknown kind.
    """
    if saved is not None:
        kinds: dict[str, type[Fixed] | type[Adaptive]] = {"fixed": Fixed, "adaptive": Adaptive}
        return kinds[saved["kind"]](**{name: v for name, v in saved.items() if name != "kind"})
    if loop.kl_target is None:
        return Fixed(loop.kl_coef)
    return Adaptive(loop.kl_coef, target=loop.kl_target, horizon=loop.kl_horizon)
