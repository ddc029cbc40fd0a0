"""What the critic learns, and how well it has."""

from __future__ import annotations

import torch

from tasks.rl.algorithms.batch import Totals
from tasks.training.objectives import Loss


def value_loss(
    values_n: torch.Tensor,
    old_values_n: torch.Tensor,
    returns_n: torch.Tensor,
    totals: Totals,
    clip: float | None,
) -> Loss:
    """Half of the mean squared error, pessimistic about large moves; a row's part of it.

    max((V - R)^2, (V_clipped - R)^2) / 2, where V_clipped is at most `clip` from the old value:
    the form that goes with PPO (arXiv:1707.06347) since its first implementation.

    Args:
        values_n: of the critic, with gradient.
        old_values_n: before the update.
        returns_n: what it is to say.
        totals: of the minibatch; the sum is divided by its tokens.
        clip: see above; None: plain squared error.

    Returns:
        The loss, and `value_loss`, `value_clip_frac` (tokens whose error the clip decides, and
        which have no gradient for it).
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
    """Share of the returns' variance that the critic foresaw: 1 - Var(R - V) / Var(R).

    1 is perfect, 0 no better than a constant, below 0 worse. Returns that do not vary leave nothing
    to explain: 0.
    """
    returns_N = returns_N.double()
    variance = returns_N.var(correction=0)
    if variance == 0:
        return 0.0
    return float(1 - (returns_N - values_N.double()).var(correction=0) / variance)
