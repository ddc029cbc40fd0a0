"""Compute one tensor in blocks of rows: apply the adapter's terms in fp32, then round once.

Results must not depend on the number of workers. So block boundaries depend on the tensor's shape
alone, every output element is computed from the same operands by the same calls, and no sum
crosses a block. A product has to give the same bits in blocks as in one piece: measured for ranks 4
to 512 and widths 64 to 8960, `B[rows] @ A` equals `(B @ A)[rows]` bit for bit if a block has at
least two rows. For a single row BLAS uses another routine with another order of summation. So every
block has at least `ROWS` rows, except in a tensor that has fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tasks.weights.execute.copying import opened
from tasks.weights.execute.full_tensors import Sources, all_rows, full_tensor, squared
from tasks.weights.execute.outcome import Measured
from tasks.weights.files import dtypes as bits
from tasks.weights.files.dtypes import ITEM_BITS, torch_dtype
from tasks.weights.files.source import Reader, extents_of, info_of
from tasks.weights.plan import Op
from tasks.weights.rounding import GRIDS, row_keys, unbiased

if TYPE_CHECKING:
    import torch


ROWS = 16
"""Minimum number of rows in a block; block sizes are multiples of it."""
ELEMENTS = 1 << 18
"""Target number of elements in a block: 1 MB in fp32, so it stays in the cache until hashed."""


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return a shape as (rows, columns): leading axes are flattened, a vector is one column."""
    if len(shape) < 2:
        return (shape[0] if shape else 1, 1)
    rows = 1
    for size in shape[:-1]:
        rows *= size
    return rows, shape[-1]


def row_blocks(rows: int, columns: int, elements: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of every block of rows; a small remainder joins the last block.

    Args:
        elements: target number of elements in a block; None for `ELEMENTS`. It must depend on
            shapes alone, so that results do not depend on the machine.
    """
    target = ELEMENTS if elements is None else elements
    step = max(ROWS, target // max(1, columns) // ROWS * ROWS)
    first = 0
    while first < rows:
        end = first + step
        if rows - end < ROWS:
            end = rows
        yield first, end
        first = end


def compute(op: Op, sources: Sources, measured: Measured) -> Iterator[NDArray[np.uint8]]:
    """Yield one output tensor's bytes block by block; a block is valid until the next is requested.

    Peak memory is a few blocks, except for tensors that need all rows (`needs_full_tensor`).

    Args:
        op: an operation of kind "compute".
        sources: inputs of the plan by name.

    Raises:
        ArtifactError: a source cannot be read.
    """
    import torch

    adapter = _Operands(sources)
    rows, columns = matrix_shape(op.read_shape)
    for first, block in _blocks(op, sources, rows, columns, measured):
        before = block.to(torch.float32)
        # Copied, because terms work in place and `before` is compared below.
        wide = _with_terms(op, before.clone(), first, adapter) if op.terms else before
        out = _stored(op, wide, before if op.terms else None, first)
        raw = _bytes(out)
        measured.nonfinite += bits.nonfinite(raw, op.dtype)
        if op.terms:
            measured.changed += _differing(raw, _bytes(block.to(out.dtype)), op.dtype)
            _measure_kept(out, wide, before, measured)
        yield raw


def _stored(op: Op, wide: torch.Tensor, before: torch.Tensor | None, first: int) -> torch.Tensor:
    """Round a block once to the output's dtype, or encode it as 8-bit weights or their scales."""
    if op.encoding is not None:
        from tasks.weights.quantized.quantize import encode

        return encode(op.encoding, wide)
    dtype = torch_dtype(op.dtype)
    if not op.unbiased or op.dtype not in GRIDS:
        return wide.to(dtype)
    return unbiased(wide, before, dtype, row_keys(op.name, first, len(wide)))


def _measure_kept(
    out: torch.Tensor, wide: torch.Tensor, before: torch.Tensor, measured: Measured
) -> None:
    """Add a block's share of the update, and of what the output and rounding to nearest keep."""
    change = (wide - before).double()
    measured.delta += squared(change)
    measured.kept += float(((out.float() - before) * change).sum())
    measured.nearest += float(((wide.to(out.dtype).float() - before) * change).sum())


def _with_terms(op: Op, wide: torch.Tensor, first: int, operands: _Operands) -> torch.Tensor:
    from tasks.weights.execute.kernels import apply

    shape = wide.shape
    wide = wide.reshape(-1) if len(op.shape) < 2 else wide
    for term in op.terms:
        wide = apply(term, wide, start=first, operand=operands)
    return wide.reshape(shape)


def _blocks(
    op: Op, sources: Sources, rows: int, columns: int, measured: Measured
) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the source's blocks: first row, and values (rows, columns) in their own dtype."""
    import torch

    pieces = [(0, rows)] if all_rows(op) else list(row_blocks(rows, columns))
    if op.is_decoded or op.transpose:
        matrix = full_tensor(op, sources, measured).reshape(rows, columns)
        for first, end in pieces:
            yield first, matrix[first:end]
        return
    item = ITEM_BITS[op.source_dtype] // 8
    with opened(op, sources) as reader:
        buffer: NDArray[np.uint8] = np.empty(0, np.uint8)
        for first, end in pieces:
            nbytes = (end - first) * columns * item
            if buffer.size < nbytes:
                buffer = np.empty(nbytes, np.uint8)
            reader.into(buffer[:nbytes], first * columns * item)
            block = torch.from_numpy(buffer[:nbytes]).view(torch_dtype(op.source_dtype))
            yield first, block.reshape(-1, columns)


class _Operands:
    """Adapter tensors of one operation as full tensors in fp32, each read once."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._loaded: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        import torch

        if name not in self._loaded:
            info = info_of(name, self._sources)
            with Reader(extents_of(name, self._sources)) as reader:
                stored = torch.from_numpy(reader.read()).view(torch_dtype(info.dtype))
            self._loaded[name] = stored.reshape(tuple(info.shape)).float()
        return self._loaded[name]


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    import torch

    raw: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def _differing(left: NDArray[np.uint8], right: NDArray[np.uint8], dtype: str) -> int:
    word = f"<u{ITEM_BITS[dtype] // 8}"
    return int(np.count_nonzero(left.view(word) != right.view(word)))
