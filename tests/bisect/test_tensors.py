"""Rounding of one tensor, and the smallest adapter's change that is not taken for it."""

from __future__ import annotations

import pytest
import torch

from tasks.bisect.tensors import compare
from tests.bisect.planting import quantised

ROUNDING = 1.66e-3
"""Root mean square of bfloat16's rounding errors, relative to the numbers."""


def weight(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Return a matrix whose rows and columns have different sizes, as trained ones have."""
    torch.manual_seed(seed)
    sizes = torch.exp(0.5 * torch.randn(rows, 1) + 0.3 * torch.randn(1, columns))
    return torch.randn(rows, columns) / columns**0.5 * sizes


def adapter(like: torch.Tensor, rank: int, size: float) -> torch.Tensor:
    """Return a change of low rank, `size` times as long as the weight."""
    change = torch.randn(like.shape[0], rank) @ torch.randn(rank, like.shape[1])
    return change * (size * like.float().norm() / change.norm())


@pytest.mark.parametrize(("shape", "seed"), [((128, 128), 0), ((256, 128), 1), ((512, 1024), 0)])
def test_rounding_is_rounding(shape: tuple[int, int], seed: int) -> None:
    fine = weight(*shape, seed)
    stored = fine.bfloat16()
    change = adapter(stored, 8, 0.05)
    merged = (stored.float() + change).bfloat16()
    pairs = {
        "cast": (fine, stored),
        "half": (fine, fine.half()),
        "upcast": (stored, fine),
        "merged in bfloat16": (merged, stored + change.bfloat16()),
        "int8": (fine, quantised(fine, "int8", shape[1])),
        "int8 in bfloat16": (stored, quantised(stored.float(), "int8", shape[1]).bfloat16()),
        "fp8": (stored, quantised(stored.float(), "fp8", shape[1]).bfloat16()),
        "int4": (stored, quantised(stored.float(), "int4", 128).bfloat16()),
    }
    wrong = [name for name, (a, b) in pairs.items() if compare(name, a, b).different]
    assert wrong == []


@pytest.mark.parametrize("equal", [200, 500])
def test_equal_rows_are_one(equal: int) -> None:
    """Tokens that were added share one embedding, and so their rounding errors."""
    fine = weight(512, 256)
    fine[-equal:] = fine[0]
    assert compare("embedding", fine, fine.bfloat16()).rounding == "bfloat16"


@pytest.mark.parametrize(
    ("side", "rank", "size"), [(256, 4, 0.3), (256, 16, 0.5), (1024, 16, 0.1), (1024, 16, 2.4)]
)
def test_a_change_below_a_step_is_no_rounding(side: int, rank: int, size: float) -> None:
    """An adapter of `size` rounding errors, merged into bfloat16 or left out there.

    The largest could be taken for eight bits.
    """
    stored = weight(side, side).bfloat16()
    merged = (stored.float() + adapter(stored, rank, size * ROUNDING)).bfloat16()
    for a, b in ((stored, merged), (merged, stored)):
        assert compare("q_proj", a, b).different
