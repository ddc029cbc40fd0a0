"""Drawing tokens from distributions, each row by one number that decides it."""

from __future__ import annotations

import torch


def sample(
    logprobs_BV: torch.Tensor, uniform_B: torch.Tensor, *, top_p: float = 1.0, top_k: int = 0
) -> torch.Tensor:
    """Draw by inverting the cumulated distribution, most likely tokens first where it is cut.

    Args:
        logprobs_BV: of all tokens.
        uniform_B: one number in [0, 1) a row, which decides its draw.
        top_p: the most likely tokens that together have at least this much; 1: all.
        top_k: that many of the most likely ones; 0: all.
    """
    if top_p >= 1 and top_k == 0:
        return _inverted(logprobs_BV.double().exp(), uniform_B)
    sorted_BV, order_BV = logprobs_BV.double().exp().sort(dim=-1, descending=True, stable=True)
    if top_k:
        sorted_BV[:, top_k:] = 0
    before = sorted_BV.cumsum(-1) - sorted_BV
    sorted_BV[before >= top_p * sorted_BV.sum(-1, keepdim=True)] = 0
    return order_BV.gather(1, _inverted(sorted_BV, uniform_B)[:, None])[:, 0]


def _inverted(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Index of the first place at which the running sum passes the draw; never one of weight 0."""
    sums = weights_BV.cumsum(-1)
    aim = uniform_B.to(sums.dtype)[:, None] * sums[:, -1:]
    last = weights_BV.shape[1] - 1 - (weights_BV.flip(-1) > 0).int().argmax(-1)
    return torch.minimum(torch.searchsorted(sums, aim, right=True)[:, 0], last)
