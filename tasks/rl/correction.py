"""Train-inference mismatch: its size, its limits, and importance weights that correct for it.

The rollout engine computes the policy with other kernels than the trainer. Responses are sampled
from the engine's distribution and trained on as if from the trainer's. Importance weights
r = exp(trainer's - engine's log-probability) correct the expectation. The kinds differ in how they
treat a large or small r:

    none            1 for every r
    tis             min(r, high): Yao et al. 2025, "Your efficient RL framework secretly brings you
                    off-policy RL training"
    icepop          r within [low, high], else 0: drops the token. Ling team 2025, "Small leak can
                    sink a great ship: boost RL training on MoE with IcePop"
    sequence_mask   r of the whole response (the product over its tokens) within [low, high], on
                    all of its tokens, else 0: drops the response. Liu, Li et al. 2025, "When speed
                    kills stability" (Seq-MIS)
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from tasks.core.errors import TrainingError
from tasks.rl.advantages import spread, sums
from tasks.rl.kl import estimate_kl

FIRST = 5
"""Number of first iterations whose median mismatch is the run's baseline."""
FLOOR = 0.1
"""The relative limit is at least this share of `mismatch_limit`: smaller mismatch is kernel noise.
"""


class Mismatch(NamedTuple):
    """Distance of the trainer's log-probabilities from the engine's, in nats per token."""

    mean_abs: float  # mean absolute difference
    max_abs: float  # largest absolute difference
    kl: float  # KL(engine || trainer), estimated by k3, see `kl.py`


@dataclass
class MismatchLimits:
    """Absolute limit of the mismatch, which ends a run, and a relative one, which warns.

    Importance weights correct for a mismatch below the absolute limit. The relative limit notices
    an engine with stale weights, but mismatch also grows with response length and entropy.
    """

    limit: float  # absolute, `rl.mismatch_limit`
    factor: float  # `rl.mismatch_factor`; 0: no relative limit
    # mean absolute differences of the first iterations, at most `FIRST`
    first: list[float] = field(default_factory=list)
    warned: bool = False  # True once a mismatch was above the relative limit

    @property
    def relative(self) -> float:
        """The relative limit; infinite before the first iteration or without a factor."""
        if not self.first or not self.factor:
            return math.inf
        return max(self.factor * statistics.median(self.first), FLOOR * self.limit)

    def require_within(self, mean_abs: float, iteration: int) -> str:
        """Check one iteration's mismatch, and record it if it is one of the first.

        Returns a warning the first time that the relative limit is exceeded, else "". Raises
        TrainingError if the mismatch is above the absolute limit.
        """
        relative = self.relative
        apart = (
            f"iteration {iteration}: trainer and engine differ by {mean_abs:.3g} nats per token "
            "(mean absolute log-prob difference)"
        )
        if not mean_abs <= self.limit:
            raise TrainingError(
                f"{apart}, more than rl.mismatch_limit={self.limit:g}: what is sampled is not what "
                "is trained",
                hint="rl.mismatch_limit=<more> accepts the difference",
            )
        if len(self.first) < FIRST:
            self.first.append(mean_abs)
        if mean_abs <= relative or self.warned:
            return ""
        self.warned = True
        return (
            f"{apart}, more than {relative:.3g}, which is rl.mismatch_factor={self.factor:g} times "
            f"the first iterations; rl.correction weighs it until rl.mismatch_limit={self.limit:g} "
            "ends the run. It grows with length and entropy, or the engine has stale weights"
        )


def mismatch(old_N: torch.Tensor, sampled_N: torch.Tensor) -> Mismatch:
    """Return the distance between the trainer's and the engine's log-probabilities.

    Raises TrainingError if a value is not finite: every comparison of a limit with NaN is false.
    """
    for whose, logprobs_N in (("the trainer's", old_N), ("the rollout engine's", sampled_N)):
        if bad := int((~logprobs_N.isfinite()).sum()):
            raise TrainingError(
                f"{bad} of {logprobs_N.numel()} of {whose} log-probabilities of the response "
                "tokens are not finite",
                hint="the policy has diverged: lower train.lr, or raise rl.kl_coef",
            )
    log_ratio_N = (old_N.double() - sampled_N.double()).abs()
    kl_N = estimate_kl(sampled_N.double(), old_N.double(), "k3")
    return Mismatch(float(log_ratio_N.mean()), float(log_ratio_N.max()), float(kl_N.mean()))


def weights(
    old_N: torch.Tensor,
    sampled_N: torch.Tensor,
    lengths_S: torch.Tensor,
    *,
    kind: str,
    high: float,
    low: float,
) -> torch.Tensor:
    """Return the weight of each token in the policy loss, (N,), without gradient.

    `kind` is one of those above; `low` is for icepop and sequence_mask.
    """
    log_ratio_N = (old_N - sampled_N).detach()
    if kind == "none":
        return torch.ones_like(log_ratio_N)
    if kind == "tis":
        return log_ratio_N.exp().clamp(max=high)
    if kind == "icepop":
        return _within(log_ratio_N.exp(), low, high)
    assert kind == "sequence_mask", kind
    return spread(_within(sums(log_ratio_N, lengths_S).exp(), low, high), lengths_S)


def _within(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)
