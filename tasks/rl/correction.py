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

import statistics
from dataclasses import dataclass, field
from typing import get_args

import torch

from tasks.config.choices import Correction
from tasks.core.errors import TrainingError
from tasks.rl.advantages import spread, sums
from tasks.rl.kl import estimate_kl

FIRST = 5
"""Number of first iterations whose median mismatch is the run's baseline."""
FLOOR = 0.1
"""The relative limit is at least this share of `mismatch_limit`: smaller mismatch is kernel noise.
"""


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
    def relative(self) -> float | None:
        """The relative limit; None before the first iteration or without a factor."""
        if not self.first or not self.factor:
            return None
        return max(self.factor * statistics.median(self.first), FLOOR * self.limit)

    def require_within(self, measured: Mismatch, iteration: int) -> str:
        """Check one iteration's mismatch, and record it if it is one of the first.

        Returns a warning the first time that the relative limit is exceeded, else "". Raises
        TrainingError if the mismatch is above the absolute limit.
        """
        now, relative = measured.mean_abs, self.relative
        prefix = f"iteration {iteration}: trainer and engine differ by {now:.3g} nats per token "
        if not now <= self.limit:
            raise TrainingError(
                f"{prefix}(mean absolute log-prob difference), more than "
                f"rl.mismatch_limit={self.limit:g}: what is sampled is not what is trained",
                hint="rl.mismatch_limit=<more> accepts the difference",
            )
        if len(self.first) < FIRST:
            self.first.append(now)
        if relative is None or now <= relative or self.warned:
            return ""
        self.warned = True
        return (
            f"{prefix}(mean absolute log-prob difference), more than {relative:.3g}, which is "
            f"rl.mismatch_factor={self.factor:g} times the first iterations; rl.correction weighs "
            f"it until rl.mismatch_limit={self.limit:g} ends the run. It grows with the responses' "
            "length and entropy, or the engine has stale weights"
        )


@dataclass(frozen=True)
class Mismatch:
    """Distance of the trainer's log-probabilities from the engine's, in nats per token."""

    mean_abs: float  # mean absolute difference
    max_abs: float  # largest absolute difference
    kl: float  # KL(engine || trainer), estimated by k3, see `kl.py`


def mismatch(old_N: torch.Tensor, sampled_N: torch.Tensor) -> Mismatch:
    """Return the distance between the trainer's and the engine's log-probabilities.

    Raises TrainingError if a value is not finite: every comparison of a limit with NaN is false.
    """
    _refuse_not_finite("the trainer's", old_N)
    _refuse_not_finite("the rollout engine's", sampled_N)
    log_ratio_N = old_N.double() - sampled_N.double()
    return Mismatch(
        mean_abs=float(log_ratio_N.abs().mean()),
        max_abs=float(log_ratio_N.abs().max()),
        kl=float(estimate_kl(sampled_N.double(), old_N.double(), "k3").mean()),
    )


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
    if kind == "sequence_mask":
        return spread(_within(sums(log_ratio_N, lengths_S).exp(), low, high), lengths_S)
    raise ValueError(f"correction {kind!r}: there are {', '.join(get_args(Correction))}")


def _within(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def _refuse_not_finite(whose: str, logprobs_N: torch.Tensor) -> None:
    bad = int((~logprobs_N.isfinite()).sum())
    if bad:
        raise TrainingError(
            f"{bad} of {logprobs_N.numel()} of {whose} log-probabilities of the response tokens "
            "are not finite",
            hint="the policy has diverged: lower train.lr, or raise rl.kl_coef",
        )
