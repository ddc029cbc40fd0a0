"""What fp32 sums may differ by: a BLAS chooses their order by CPU and by shape.

MKL sums up to 384 terms in order on Intel's CPUs; on AMD's it parts sums of more than 192, and
takes other routines for few rows. So equal bits are asked of what is ours, and of copies.
"""

from __future__ import annotations

import torch

_TERMS = 4e-6
"""Of fp32 sums of some hundred numbers around 1, summed in two orders."""


def in_order(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """`b @ a` in fp32, by its definition: one fused multiply-add after the other, from the first.

    A product of two fp32 is exact in fp64; that its sum is rounded there first shows in one of
    2^29 sums.
    """
    left, right = b.double(), a.double()
    total = torch.zeros(len(b), a.shape[1])
    for k in range(len(a)):
        total = (left[:, k : k + 1] * right[k] + total).float()
    return total


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether fp32 results differ by no more than the order of their sums."""
    return found.shape == wanted.shape and torch.allclose(found, wanted, rtol=_TERMS, atol=_TERMS)


def rounded_alike(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether numbers of 16 bits are equal, but for sums that lay between two of them.

    Those are one unit in the last place apart (near zero what a sum may differ by), and one of a
    thousand at the most.
    """
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return False
    others, step = int((found != wanted).sum()), torch.finfo(wanted.dtype).eps
    few = others <= max(1, found.numel() // 1000)
    return few and torch.allclose(found.float(), wanted.float(), rtol=step, atol=5 * _TERMS)
