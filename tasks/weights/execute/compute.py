"""Compute one tensor in blocks of rows: apply the adapter's terms in fp32, then round once.

Results must not depend on the number of workers. So block boundaries depend on the tensor's shape
alone, every output element is computed from the same operands by the same calls, and no sum
crosses a block. A product has to give the same bits in blocks as in one piece: measured for ranks 4
to 512 and widths 64 to 8960, `B[rows] @ A` equals `(B @ A)[rows]` bit for bit if a block has at
least two rows. For a single row BLAS uses another routine with another order of summation.

The order of operations is that of peft 0.21 (`lora/layer.py`, `lora/variants.py`), because floating
point addition is not associative: first the product, then the scale, then the sum. A block is 2-D
for matrices and 1-D for vectors. A stack of experts (experts, rows, columns) is passed flattened as
(experts * rows, columns); `start` counts flattened rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tasks.weights.execute.outcome import Written
from tasks.weights.files import dtypes as bits
from tasks.weights.files.dtypes import DTYPE_NAMES, ITEM_BITS, torch_dtype
from tasks.weights.files.tensors import Reader, Sources, part, tensor_of
from tasks.weights.plan import (
    Add,
    Dora,
    LowRank,
    Op,
    Rows,
    Term,
    as_slice,
    matrix_shape,
    needs_all_rows,
    row_blocks,
)
from tasks.weights.rounding import GRIDS, row_keys, unbiased

if TYPE_CHECKING:
    import torch


def compute(op: Op, sources: Sources, written: Written) -> Iterator[NDArray[np.uint8]]:
    """Yield one output tensor's bytes block by block; a block is valid until the next is requested.

    Peak memory is a few blocks, except for tensors that need all rows (`needs_full_tensor`).

    Args:
        op: an operation of kind "compute".
        sources: inputs of the plan by name.
        written: gets the statistics of the tensor.

    Raises:
        ArtifactError: a source cannot be read.
    """
    import torch

    adapter, changed = _Operands(sources), 0
    for first, block in _blocks(op, sources):
        before = block.to(torch.float32)
        # Copied, because terms work in place and `before` is compared below.
        wide = _with_terms(op, before.clone(), first, adapter) if op.terms else before
        out = _stored(op, wide, before if op.terms else None, first)
        raw = _bytes(out)
        written.nonfinite += bits.nonfinite(raw, op.dtype)
        if op.terms:
            same = out.view(torch.uint8) == block.to(out.dtype).view(torch.uint8)
            width = out.element_size()
            changed += int((~same.reshape(-1, width).all(dim=1)).sum())
            change = (wide - before).double()
            written.update += float(change.square().sum())
            written.kept += float(((out.float() - before) * change).sum())
            written.nearest += float(((wide.to(out.dtype).float() - before) * change).sum())
        yield raw
    if op.terms:
        written.changed = changed / prod(op.shape)


def _stored(op: Op, wide: torch.Tensor, before: torch.Tensor | None, first: int) -> torch.Tensor:
    """Round a block once to the output's dtype, or encode it as 8-bit weights or their scales."""
    if op.encoding is not None:
        from tasks.weights.quantized.quantize import encode

        return encode(op.encoding, wide)
    dtype = torch_dtype(op.dtype)
    if not op.unbiased or op.dtype not in GRIDS:
        return wide.to(dtype)
    return unbiased(wide, before, dtype, row_keys(op.name, first, len(wide)))


def _blocks(op: Op, sources: Sources) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the source's blocks: first row, and values (rows, columns) in their own dtype."""
    import torch

    rows, columns = matrix_shape(op.read_shape)
    pieces = [(0, rows)] if _takes_all_rows(op) else list(row_blocks(rows, columns))
    if op.is_decoded or op.transpose:
        matrix = _full_tensor(op, sources).reshape(rows, columns)
        for first, end in pieces:
            yield first, matrix[first:end]
        return
    item = ITEM_BITS[op.source_dtype] // 8
    largest = max(end - first for first, end in pieces) * columns * item
    buffer: NDArray[np.uint8] = np.empty(largest, np.uint8)
    with opened(op, sources) as reader:
        for first, end in pieces:
            raw = buffer[: (end - first) * columns * item]
            reader.into(raw, first * columns * item)
            block = torch.from_numpy(raw).view(torch_dtype(op.source_dtype))
            yield first, block.reshape(-1, columns)


def opened(op: Op, sources: Sources) -> Reader:
    """Open a reader of the bytes that an operation starts from."""
    first = op.start * ITEM_BITS[op.source_dtype] // 8
    return Reader(part(sources[op.input][op.key].extents, first, source_bytes(op)))


def source_bytes(op: Op) -> int:
    """Return the number of bytes that an operation reads of its source tensor."""
    return prod(op.read_shape) * ITEM_BITS[op.source_dtype] // 8


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    import torch

    raw: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return raw


def needs_full_tensor(op: Op) -> bool:
    """Return True if the full tensor is in memory while it is computed.

    That is so for 4-bit quantization, whose double quantization takes a mean over all scales, for a
    transposed source, and for terms that need norms of columns.
    """
    return op.is_decoded or op.transpose or _takes_all_rows(op)


def _takes_all_rows(op: Op) -> bool:
    return any(needs_all_rows(term) for term in op.terms)


def _full_tensor(op: Op, sources: Sources) -> torch.Tensor:
    """Load the full source tensor in the output's shape, through 4 bits if the plan says so."""
    import torch

    shape = op.read_shape
    if op.packed is not None:
        from tasks.weights.quantized.packed import decoded

        matrix = torch.from_numpy(decoded(op.packed, sources[op.input][op.key].extents))
        flat = matrix.reshape(-1)[op.start : op.start + prod(shape)]
    else:
        with opened(op, sources) as reader:
            flat = torch.from_numpy(reader.read()).view(torch_dtype(op.source_dtype))
    if op.transpose:
        turned = flat.reshape(*shape[:-2], shape[-1], shape[-2])
        stored = turned.transpose(-1, -2).contiguous()
    else:
        stored = flat.reshape(shape)
    if op.quantization is None or op.quantization["base"] != "dequantized":
        return stored
    from tasks.weights.quantized.nf4 import as_trained

    loaded = stored.to(torch_dtype(DTYPE_NAMES[op.quantization["loaded_dtype"]]))
    return as_trained(loaded, op.quantization)  # not rounded to the dtype on disk


class _Operands:
    """Adapter tensors of one operation as full tensors in fp32, each read once."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._loaded: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        import torch

        if name not in self._loaded:
            info = tensor_of(name, self._sources)
            with Reader(tensor_of(name, self._sources).extents) as reader:
                stored = torch.from_numpy(reader.read()).view(torch_dtype(info.dtype))
            self._loaded[name] = stored.reshape(tuple(info.shape)).float()
        return self._loaded[name]


def _with_terms(op: Op, wide: torch.Tensor, first: int, operands: _Operands) -> torch.Tensor:
    """Apply all terms to fp32 rows from `first` on; may overwrite `wide`."""
    shape = wide.shape
    wide = wide.reshape(-1) if len(op.shape) < 2 else wide
    for term in op.terms:
        wide = _apply(term, wide, first, operands)
    return wide.reshape(shape)


def _apply(term: Term, block: torch.Tensor, start: int, operand: _Operands) -> torch.Tensor:
    match term:
        case LowRank():
            return block.add_(_low_rank(term, start, block.shape, operand))
        case Dora():
            return _dora(term, block, start, operand)
        case Rows():
            return _rows(term, block, start, operand)
        case Add():
            value = operand(term.value)[start : start + len(block)]
            return block.add_(value * term.scale)


def _low_rank(
    term: LowRank, start: int, shape: tuple[int, ...], operand: _Operands
) -> torch.Tensor:
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
        own = term.of_expert(expert, a.shape[0])
        product[row - start : row - start + count] = _product(own, first, count, a, b)
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
    if count == 1 < height:  # for a single row BLAS sums in another order: compute two
        low = min(first, height - 2)
        high = low + 2
    if term.transpose:
        # Transposed after the product, like peft: the order of summation is then the same.
        product = (b @ a[:, low:high]).T
    else:
        product = b[low:high] @ a
    return product[first - low : first - low + count].mul_(term.scale)


def _dora(term: Dora, block: torch.Tensor, start: int, operand: _Operands) -> torch.Tensor:
    from torch.linalg import vector_norm

    change = LowRank(term.a, term.b, term.scale, term.transpose, out_start=term.out_start)
    block.add_(_low_rank(change, start, block.shape, operand))
    magnitude = operand(term.magnitude)
    if term.transpose:
        return block.mul_(magnitude / vector_norm(block, dim=0))
    magnitude = magnitude[start + term.out_start :][: len(block)]
    return block.mul_((magnitude / vector_norm(block, dim=1)).unsqueeze(1))


def _rows(term: Rows, block: torch.Tensor, start: int, operand: _Operands) -> torch.Tensor:
    import torch

    rows = torch.tensor(term.indices) - start
    inside = (rows >= 0) & (rows < len(block))
    block[rows[inside]] = operand(term.values)[inside]
    return block
