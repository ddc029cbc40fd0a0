"""The rollout engine computes the policy in other kernels than the trainer: how far off, and what
is done about it.

Replies are drawn from the engine's distribution and trained on as if from the trainer's. With
r = exp(trainer's - engine's log-probability), expectations are right again when every token's part
is weighted by r; the kinds differ in what becomes of a large or small r:

    none            1, whatever r is
    tis             min(r, high): Yao et al. 2025, "Your efficient RL framework secretly brings you
                    off-policy RL training"
    icepop          r within [low, high], else 0: the token is left out. Ling team 2025, "Small leak
                    can sink a great ship: boost RL training on MoE with IcePop"
    sequence_mask   r of the whole reply (the product over its tokens) within [low, high], on all of
                    its tokens, else 0: the reply is left out. Liu, Li et al. 2025, "When speed
                    kills stability" (Seq-MIS)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tasks.errors import TrainingError
from tasks.rl.advantages import spread, sums
from tasks.rl.knobs import CORRECTIONS


@dataclass(frozen=True)
class Mismatch:
    """Distance of the trainer's log-probabilities from the engine's, in nats a token.

    Attributes:
        mean_abs: mean absolute difference.
        max_abs: largest absolute difference.
        kl: KL(engine || trainer), estimated by k3, see `kl.py`.
    """

    mean_abs: float
    max_abs: float
    kl: float


def mismatch(old_N: torch.Tensor, sampled_N: torch.Tensor) -> Mismatch:
    """How far the two are apart.

    Args:
        old_N: the trainer's log-probabilities, at least one.
        sampled_N: the engine's.

    Raises:
        TrainingError: a number that is not finite. (No limit would ever notice it: every comparison
            with NaN is false.)
    """
    _refuse_not_finite("the trainer's", old_N)
    _refuse_not_finite("the rollout engine's", sampled_N)
    log_ratio_N = old_N.double() - sampled_N.double()
    return Mismatch(
        mean_abs=float(log_ratio_N.abs().mean()),
        max_abs=float(log_ratio_N.abs().max()),
        kl=float((torch.expm1(log_ratio_N) - log_ratio_N).mean()),
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
    """What each token's part of the policy's loss is multiplied with, (N,), without gradient.

    Args:
        old_N: the trainer's log-probabilities of the replies' tokens, before any update.
        sampled_N: the engine's.
        lengths_S: tokens of each reply.
        kind: see above.
        high: largest ratio that counts in full.
        low: smallest; of icepop and sequence_mask.

    Raises:
        ValueError: a kind that there is not.
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
    raise ValueError(f"correction {kind!r}: there are {', '.join(CORRECTIONS)}")


def _within(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def _refuse_not_finite(whose: str, logprobs_N: torch.Tensor) -> None:
    bad = int((~logprobs_N.isfinite()).sum())
    if bad:
        raise TrainingError(
            f"{bad} of {logprobs_N.numel()} of {whose} log-probabilities of the replies' tokens "
            "are not finite",
            hint="a policy that has diverged: lower train.lr, or raise rl.kl_coef",
        )
