"""The arithmetic of a LoRA merge: `W + scale * B @ A`, in fp32, rounded once.

LoRA: https://arxiv.org/abs/2106.09685, rank-stabilised scaling: https://arxiv.org/abs/2312.03732.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def lora_scale(alpha: float, rank: int, *, rslora: bool) -> float:
    """`alpha / rank`, or `alpha / sqrt(rank)` for rsLoRA."""
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def delta(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """`scale * B @ A` in fp32.

    Args:
        a: shape (rank, in).
        b: shape (out, rank).
        scale: a number, not 0.

    Returns:
        shape (out, in), float32.
    """
    # Product first, then the scale, as peft does: a fused alpha would round elsewhere.
    return (b.float() @ a.float()).mul_(scale)


def fold(weight: torch.Tensor, change: torch.Tensor) -> torch.Tensor:
    """`weight + change` in fp32, cast once to the weight's dtype.

    Args:
        weight: shape (out, in), any float dtype.
        change: shape (out, in), float32.
    """
    return (weight.float() + change).to(weight.dtype)
