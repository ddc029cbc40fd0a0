"""Distance from the reference: estimates from samples, and the coefficient it is weighed with.

J. Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). For a token that
the policy p drew and the reference q scored, with d = log p - log q:

    k1 = d                  unbiased for KL(p || q), of either sign
    k2 = d^2 / 2            biased, positive, of low variance
    k3 = exp(-d) - 1 + d    unbiased, positive, of low variance

As a term of a loss the derivative counts, not the value. That of k1 is zero on average whatever p
and q are, and would pull nowhere; `estimate` gives k1 the derivative d * grad log p, whose average
is the gradient of KL(p || q), and which k2 has by itself. k3 keeps its own, as in GRPO
(arXiv:2402.03300, eq. 4): its average is the gradient of KL(q || p), of the same minimum.
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
"""Share of the target past which `Adaptive` takes a miss for no larger (arXiv:1909.08593, 2.2)."""


def estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """Estimated KL(policy || reference) of each token, in nats, with the gradient told above.

    Args:
        logprobs: of the policy, which drew the tokens; any shape.
        reference: log-probabilities of the same tokens under the reference, same shape.
        estimator: k1, k2 or k3.

    Raises:
        ValueError: an estimator that there is not.
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
    """The weight of the distance in the coming iteration.

    Attributes:
        coef: that weight.
    """

    @property
    def coef(self) -> float:
        """The weight."""
        ...

    def after(self, kl: float, replies: int) -> Controller:
        """The controller of the next iteration."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, and `controller` goes on from."""
        ...


@dataclass(frozen=True)
class Fixed:
    """Always the same coefficient."""

    coef: float

    def after(self, kl: float, replies: int) -> Fixed:
        """Itself."""
        return self

    def as_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"kind": "fixed", **asdict(self)}


@dataclass(frozen=True)
class Adaptive:
    """Steers to a target: the proportional controller of arXiv:1909.08593, 2.2, eq. 4.

    The miss e = kl / target - 1, cut to +-0.2, moves the coefficient by the factor
    (1 + e)^(replies / horizon). The paper's 1 + e * replies / horizon is its first order; as a
    power it cannot turn negative, and two iterations do what one of twice the size does.

    Attributes:
        coef: the weight.
        target: nats a token.
        horizon: replies in which the coefficient moves by at most a fifth.
    """

    coef: float
    target: float
    horizon: int

    def after(self, kl: float, replies: int) -> Adaptive:
        """The controller of the next iteration.

        Args:
            kl: nats a token, measured over this iteration.
            replies: of this iteration, over all ranks.
        """
        error = min(max(kl / self.target - 1, -LARGEST_ERROR), LARGEST_ERROR)
        return replace(self, coef=self.coef * (1 + error) ** (replies / self.horizon))

    def as_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"kind": "adaptive", **asdict(self)}


def controller(loop: Loop, saved: Mapping[str, Any] | None = None) -> Controller:
    """The controller that section `rl` asks for.

    Args:
        loop: the section.
        saved: `as_dict` of the controller that a checkpoint kept, which goes on; None: from the
            start.

    Raises:
        KeyError: it is of another kind than there are.
    """
    if saved is not None:
        kinds: dict[str, type[Fixed] | type[Adaptive]] = {"fixed": Fixed, "adaptive": Adaptive}
        return kinds[saved["kind"]](**{name: v for name, v in saved.items() if name != "kind"})
    if loop.kl_target is None:
        return Fixed(loop.kl_coef)
    return Adaptive(loop.kl_coef, target=loop.kl_target, horizon=loop.kl_horizon)
