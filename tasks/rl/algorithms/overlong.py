"""Soft penalty for responses near the token limit. DAPO, arXiv:2503.14476, eq. 13."""

from __future__ import annotations

import torch


def penalty(lengths_S: torch.Tensor, *, limit: int, buffer: int, most: float) -> torch.Tensor:
    """Return the number to add to each response's score, (S,) float32, between 0 and `-most`.

    It is 0 up to `limit - buffer` tokens and falls linearly to `-most` at the limit.

    Args:
        lengths_S: tokens of each response, none above the limit.
        limit: token limit of a response, `rollout.max_new_tokens`.
        buffer: number of tokens before the limit with a penalty; 0: no penalty.
        most: penalty at the limit.
    """
    if buffer == 0:
        return torch.zeros(len(lengths_S), dtype=torch.float32, device=lengths_S.device)
    over_S = (lengths_S - (limit - buffer)).clamp(min=0).float()
    return -most * over_S / buffer
