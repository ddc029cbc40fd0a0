"""Soft penalty for replies that come near the limit. DAPO, arXiv:2503.14476, eq. 13."""

from __future__ import annotations

import torch


def penalty(lengths_S: torch.Tensor, *, limit: int, buffer: int, most: float) -> torch.Tensor:
    """What is added to each reply's score, (S,) float32: 0 to `-most`.

    Nothing up to `limit - buffer` tokens; from there it falls evenly, to `-most` at the limit.

    Args:
        lengths_S: tokens of each reply, none above the limit.
        limit: longest reply, `rollout.max_new_tokens`.
        buffer: tokens before the limit; 0: no penalty.
        most: at the limit.
    """
    if buffer == 0:
        return torch.zeros(len(lengths_S), dtype=torch.float32, device=lengths_S.device)
    over_S = (lengths_S - (limit - buffer)).clamp(min=0).float()
    return -most * over_S / buffer
