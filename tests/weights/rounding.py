"""Tolerances of fp32 sums: BLAS chooses the order of summation by CPU and by shape.

MKL sums up to 384 terms in order on Intel CPUs; on AMD CPUs it splits sums of more than 192, and
uses other routines for few rows. So tests require equal bits only from our own code and of copies.
"""

from __future__ import annotations

import torch

_TERMS = 4e-6
"""Difference of fp32 sums of a few hundred numbers around 1, summed in two orders."""


def in_order(b: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """Return `b @ a` in fp32 by its definition: one fused multiply-add after the other.

    A product of two fp32 numbers is exact in fp64. The sum is rounded there first, which shows in
    one of 2^29 sums.
    """
    left, right = b.double(), a.double()
    total = torch.zeros(len(b), a.shape[1])
    for k in range(len(a)):
        total = (left[:, k : k + 1] * right[k] + total).float()
    return total


def near(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return True if fp32 results differ by no more than the order of their sums."""
    return actual.shape == wanted.shape and torch.allclose(actual, wanted, rtol=_TERMS, atol=_TERMS)


def rounded_alike(actual: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return True if 16-bit numbers are equal, except for sums that lay between two of them.

    Those may differ by one unit in the last place (near zero by the error of a sum), at most one
    in a thousand.
    """
    if (actual.dtype, actual.shape) != (wanted.dtype, wanted.shape):
        return False
    differing, step = int((actual != wanted).sum()), torch.finfo(wanted.dtype).eps
    few = differing <= max(1, actual.numel() // 1000)
    return few and torch.allclose(actual.float(), wanted.float(), rtol=step, atol=5 * _TERMS)
