"""Blocks of rows: how a tensor is cut for the arithmetic.

Results must not depend on the number of workers, so the cuts depend on the tensor's shape alone:
every output element is computed from the same operands by the same calls, whoever makes them, and
no sum runs over more than one block. Nor may the cuts change the sums of a product: measured over
ranks 4 to 512 and widths 64 to 8960, `B[rows] @ A` has the bits of `(B @ A)[rows]` for every block
of two rows or more; BLAS takes another routine, with another order of summation, for a single row.
So no block but that of a tensor of a single row has fewer than `ROWS` rows.
"""

from __future__ import annotations

from collections.abc import Iterator

ROWS = 16
"""Least number of rows, and what a number of rows is a multiple of."""
ELEMENTS = 1 << 18
"""Elements aimed at: 1 MB in fp32, half of that in bf16; a block is in the cache until hashed."""


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """(rows, columns) as terms see a tensor: leading axes flattened; a vector is one column."""
    if len(shape) < 2:
        return (shape[0] if shape else 1, 1)
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def row_blocks(rows: int, columns: int, elements: int | None = None) -> Iterator[tuple[int, int]]:
    """(first, end) of every block. The last one takes a rest that would be too small alone.

    Args:
        rows: of the tensor.
        columns: of the tensor.
        elements: aimed at in a block; None for ELEMENTS. Must follow from the shapes alone.
    """
    aim = ELEMENTS if elements is None else elements
    step = max(ROWS, aim // max(1, columns) // ROWS * ROWS)
    first = 0
    while first < rows:
        end = first + step
        if rows - end < ROWS:
            end = rows
        yield first, end
        first = end
