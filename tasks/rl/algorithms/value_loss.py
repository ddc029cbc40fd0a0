"""The critic's loss, and the share of variance that it explains."""

from __future__ import annotations

import torch

from tasks.rl.algorithms.batch import Totals
from tasks.training.losses import Loss


def value_loss(
    values_n: torch.Tensor,
    old_values_n: torch.Tensor,
    returns_n: torch.Tensor,
    totals: Totals,
    clip: float | None,
) -> Loss:
    """Return this row's part of half the mean squared error, with clipped values.

    max((V - R)^2, (V_clipped - R)^2) / 2, where V_clipped is at most `clip` from the old value:
    used with PPO (arXiv:1707.06347) since its first implementation.

    Args:
        values_n: by the critic, with gradient.
        old_values_n: before the update.
        returns_n: the targets.
        totals: of the minibatch; the sum is divided by its tokens.
        clip: largest change of a value; None: plain squared error.

    Returns:
        The loss, and the metrics `value_loss` and `value_clip_frac` (share of tokens whose loss is
        the clipped one; they have no gradient).
    """
    squares_n = (values_n - returns_n).square()
    if clip is None:
        clipped_n = squares_n
    else:
        moved_n = old_values_n + (values_n - old_values_n).clamp(-clip, clip)
        clipped_n = (moved_n - returns_n).square()
    value = torch.maximum(squares_n, clipped_n).sum() / 2 / totals.tokens
    decided = (clipped_n > squares_n).to(values_n.dtype).sum() / totals.tokens
    return Loss(value, {"value_loss": value.detach(), "value_clip_frac": decided})


def explained_variance(values_N: torch.Tensor, returns_N: torch.Tensor) -> float:
    """Return the share of the returns' variance that the critic predicts: 1 - Var(R - V) / Var(R).

    1 is perfect, 0 is no better than a constant, below 0 is worse. 0 if the returns do not vary.
    """
    returns_N = returns_N.double()
    variance = returns_N.var(correction=0)
    if variance == 0:
        return 0.0
    return float(1 - (returns_N - values_N.double()).var(correction=0) / variance)
