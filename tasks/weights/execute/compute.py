"""Compute one tensor in blocks of rows: apply the adapter's terms in fp32, then round once.

Results must not depend on the number of workers. So block boundaries depend on the tensor's shape
alone, every output element is computed from the same operands by the same calls, and no sum
crosses a block. A product has to give the same bits in blocks as in one piece: measured for ranks 4
to 512 and widths 64 to 8960, `B[rows] @ A` equals `(B @ A)[rows]` bit for bit if a block has at
least two rows. For a single row BLAS uses another routine with another order of summation. So every
block has at least `ROWS` rows, except in a tensor that has fewer.

The order of operations is that of peft 0.21 (`lora/layer.py`, `lora/variants.py`), because floating
point addition is not associative: first the product, then the scale, then the sum. A block is 2-D
for matrices and 1-D for vectors. A stack of experts (experts, rows, columns) is passed flattened as
(experts * rows, columns); `start` counts flattened rows.

4-bit quantization, transposed sources and norms of columns need the full tensor (`full_tensor`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.execute.copying import opened
from tasks.weights.execute.outcome import Measured
from tasks.weights.files import dtypes as bits
from tasks.weights.files.dtypes import DTYPE_NAMES, ITEM_BITS, torch_dtype
from tasks.weights.files.source import Reader, Source, extents_of, info_of
from tasks.weights.plan import Add, Dora, LowRank, Op, Rows, Term, as_slice, needs_all_rows
from tasks.weights.rounding import GRIDS, row_keys, unbiased

if TYPE_CHECKING:
    import torch

Sources = Mapping[str, Source]
Operand = Callable[[str], "torch.Tensor"]
"""Return a full adapter tensor, in any float dtype, by the name that a term uses for it."""


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


def needs_full_tensor(op: Op) -> bool:
    """Return True if the full tensor is in memory while it is computed.

    That is so for 4-bit quantization, whose double quantization takes a mean over all scales, for a
    transposed source, and for terms that need norms of columns.
    """
    return op.is_decoded or op.transpose or all_rows(op)


def all_rows(op: Op) -> bool:
    """Return True if a term needs all rows at once, because it takes norms of columns."""
    return any(needs_all_rows(term) for term in op.terms)


def full_tensor(op: Op, sources: Sources, measured: Measured) -> torch.Tensor:
    """Load the full source tensor in the output's shape, through 4 bits if the plan says so.

    Args:
        sources: inputs of the plan by name.
    """
    shape = op.read_shape
    wanted = (*shape[:-2], shape[-1], shape[-2]) if op.transpose else shape
    stored = _flat(op, sources).reshape(wanted)
    if op.transpose:
        stored = stored.transpose(-1, -2).contiguous()
    if op.quantization is None:
        return stored
    return _quantised(stored, op.quantization, measured)


def _flat(op: Op, sources: Sources) -> torch.Tensor:
    """Load the elements that `op` starts from, 1-D; a source stored in 4 bits is decoded."""
    import torch

    if op.packed is not None:
        from tasks.weights.quantized.source import decoded

        matrix = decoded(op.packed, sources[op.input].extents(op.key))
        return matrix.reshape(-1)[op.start : op.start + prod(op.read_shape)]
    with opened(op, sources) as reader:
        return torch.from_numpy(reader.read()).view(torch_dtype(op.source_dtype))


def _quantised(
    stored: torch.Tensor, quantization: Mapping[str, Any], measured: Measured
) -> torch.Tensor:
    """Return the base as QLoRA training used it, or as stored for a merge into the original."""
    from tasks.weights.quantized.nf4 import as_trained

    loaded = stored.to(torch_dtype(DTYPE_NAMES[quantization["loaded_dtype"]]))
    dequantized = as_trained(loaded, quantization)  # not rounded to the dtype on disk
    measured.error = squared(stored.float() - dequantized.float())
    return dequantized if quantization["base"] == "dequantized" else stored


def squared(tensor: torch.Tensor) -> float:
    """Return the squared Frobenius norm."""
    return float(tensor.double().square().sum())


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
