"""Arithmetic of an adapter's terms: apply one term to a block of rows of one tensor, in fp32.

    block = base[start : start + n].float()
    for term in op.terms:
        block = apply(term, block, start=start, operand=adapter_tensor)
    out = block.to(dtype)                                                   # the only rounding

The order of operations is that of peft 0.21 (`lora/layer.py`, `lora/variants.py`), because floating
point addition is not associative: first the product, then the scale, then the sum.

A block is 2-D for matrices and 1-D for vectors. A stack of experts (experts, rows, columns) is
passed flattened as (experts * rows, columns); `start` counts flattened rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tasks.weights.plan import Add, Dora, LowRank, Rows, Term, as_slice

if TYPE_CHECKING:
    import torch

Operand = Callable[[str], "torch.Tensor"]
"""Return a full adapter tensor, in any float dtype, by the name that a term uses for it."""


def apply(term: Term, block: torch.Tensor, *, start: int, operand: Operand) -> torch.Tensor:
    """Apply one term to a block and return the result; may overwrite `block`.

    Args:
        term: the operation, such as `LowRank` or `Dora`.
        block: fp32 rows `[start, start + len(block))` of the output tensor.
        start: first row of the block; 0 if `needs_all_rows(term)`.
        operand: returns the adapter's tensors by name.
    """
    match term:
        case LowRank():
            return block.add_(_low_rank(term, start, block.shape, operand))
        case Dora():
            return _dora(term, block, start, operand)
        case Rows():
            return _rows(term, block, start, operand)
        case Add():
            value = operand(term.value).float()[start : start + len(block)]
            return block.add_(value * term.scale)


def _low_rank(term: LowRank, start: int, shape: tuple[int, ...], operand: Operand) -> torch.Tensor:
    """Return `scale * B @ A` for the rows of a block, experts flattened, in the block's shape."""
    import torch

    a, b = operand(term.a), operand(term.b)
    if term.experts == 1:
        return _product(term, start + term.out_start, shape[0], a, b)
    height = a.shape[1] if term.transpose else b.shape[0]
    product = torch.empty(shape, dtype=torch.float32)
    row, end = start, start + shape[0]
    while row < end:
        expert, first = divmod(row, height)
        count = min(height - first, end - row)
        part = term.of_expert(expert, a.shape[0])
        product[row - start : row - start + count] = _product(part, first, count, a, b)
        row += count
    return product


def _product(
    term: LowRank, first: int, count: int, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Return rows `[first, first + count)` of one expert's scaled product."""
    a = a[as_slice(term.a_rows)]
    b = b[:, as_slice(term.b_columns)]
    height = a.shape[1] if term.transpose else b.shape[0]
    low, high = first, first + count
    if count == 1 < height:
        # For a single row BLAS uses another routine, which sums in another order: compute two.
        low = min(first, height - 2)
        high = low + 2
    if term.transpose:
        # Transposed after the product, like peft: the order of summation is then the same.
        product = (b.float() @ a[:, low:high].float()).T
    else:
        product = b[low:high].float() @ a.float()
    return product[first - low : first - low + count].mul_(term.scale)


def _dora(term: Dora, block: torch.Tensor, start: int, operand: Operand) -> torch.Tensor:
    from torch.linalg import vector_norm

    change = LowRank(term.a, term.b, term.scale, term.transpose, out_start=term.out_start)
    block.add_(_low_rank(change, start, block.shape, operand))
    magnitude = operand(term.magnitude).float()
    if term.transpose:
        return block.mul_(magnitude / vector_norm(block, dim=0))
    magnitude = magnitude[start + term.out_start :][: len(block)]
    return block.mul_((magnitude / vector_norm(block, dim=1)).unsqueeze(1))


def _rows(term: Rows, block: torch.Tensor, start: int, operand: Operand) -> torch.Tensor:
    import torch

    rows = torch.tensor(term.indices) - start
    inside = (rows >= 0) & (rows < len(block))
    block[rows[inside]] = operand(term.values)[inside].float()
    return block
