"""Compute one tensor in blocks of rows: apply the adapter's terms in fp32, then round once.

Results must not depend on the number of workers. So block boundaries depend on the tensor's shape
alone, every output element is computed from the same operands by the same calls, and no sum
crosses a block. A product has to give the same bits in blocks as in one piece: measured for ranks 4
to 512 and widths 64 to 8960, `B[rows] @ A` equals `(B @ A)[rows]` bit for bit if a block has at
least two rows. For a single row BLAS uses another routine with another order of summation.

The order of operations is that of peft 0.21 (`lora/layer.py`, `lora/variants.py`), because floating
point addition is not associative: first the product, then the scale, then the sum. A stack of
experts (experts, rows, columns) is passed flattened as (experts * rows, columns); `start` counts
flattened rows.

The common case, LoRA on a bf16 matrix, is done by a C kernel in one pass and without torch. It sums
products in order, so its result is the same on every CPU; torch gives the same bits where its BLAS
sums in order (MKL on Intel up to 384 terms, on AMD up to 192), and elsewhere differs only in sums
that lie between two numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tasks.weights.files import dtypes as bits
from tasks.weights.files.dtypes import DTYPE_NAMES, ITEM_BITS, NUMPY, torch_dtype, widened
from tasks.weights.files.tensors import Reader, Sources, part, read_all, tensor_of
from tasks.weights.native import MAX_RANK, library
from tasks.weights.plan import (
    LowRank,
    Op,
    Rows,
    Term,
    Written,
    matrix_shape,
    operands,
    row_blocks,
)
from tasks.weights.rounding import GRIDS, row_keys, unbiased

if TYPE_CHECKING:
    import torch

Blocks = Iterator[NDArray[np.uint8]]

MEMORY = 7 << 18
"""Target for the memory of one tensor in the kernel, in bytes: all of A, and as many rows as fit.
Memory therefore does not grow with a model's width until A alone exceeds it."""


def compute(op: Op, sources: Sources, written: Written) -> Blocks:
    """Return the bytes of the output tensor of an operation of kind "compute", block by block.

    A block is valid until the next is requested. `written` gets the statistics of the tensor.
    Raises ArtifactError if a source cannot be read.
    """
    term = _kernel_term(op, sources)
    if term is not None:
        return _fold(op, term, sources, written)
    return _compute(op, sources, written)


def needs_torch(op: Op, sources: Sources) -> bool:
    """Return True if torch computes the tensor."""
    return op.kind == "compute" and _kernel_term(op, sources) is None


def memory(op: Op, sources: Sources) -> int:
    """Return the bytes of memory that an operation takes in addition to its blocks."""
    if op.kind != "compute":
        return 0
    if (term := _kernel_term(op, sources)) is not None:
        return _size_of_a(term, sources)
    is_full = op.is_decoded or op.transpose
    names = (name for term in op.terms for name in operands(term))
    numbers = sum(prod(tensor_of(name, sources).shape) for name in names)
    return 4 * (numbers + (2 * prod(op.read_shape) if is_full else 0))


def opened(op: Op, sources: Sources) -> Reader:
    """Open a reader of the bytes that an operation starts from."""
    first = op.start * ITEM_BITS[op.source_dtype] // 8
    return Reader(part(tensor_of(op.source, sources).extents, first, source_bytes(op)))


def source_bytes(op: Op) -> int:
    """Return the number of bytes that an operation reads of its source tensor."""
    return prod(op.read_shape) * ITEM_BITS[op.source_dtype] // 8


# By torch.


def _compute(op: Op, sources: Sources, written: Written) -> Blocks:
    import torch

    operand, changed = cache(partial(full, sources=sources)), 0
    for first, block in _blocks(op, sources):
        before = block.to(torch.float32)
        # Copied, because terms work in place and `before` is compared below.
        wide = before.clone() if op.terms else before
        for term in op.terms:
            wide = _apply(term, wide, first, operand)
        out = _stored(op, wide, before if op.terms else None, first)
        raw: NDArray[np.uint8] = out.contiguous().reshape(-1).view(torch.uint8).numpy()
        written.nonfinite += bits.nonfinite(raw, op.dtype)
        if op.terms:
            same = out.view(torch.uint8) == block.to(out.dtype).view(torch.uint8)
            changed += int((~same.reshape(-1, out.element_size()).all(dim=1)).sum())
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
    pieces = list(row_blocks(rows, columns))
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


def _full_tensor(op: Op, sources: Sources) -> torch.Tensor:
    """Load the full source tensor in the output's shape, through 4 bits if the plan says so.

    Double quantization takes a mean over all scales, so it cannot be done in blocks.
    """
    import torch

    shape = op.read_shape
    if op.packed is not None:
        from tasks.weights.quantized.packed import decoded

        matrix = torch.from_numpy(decoded(op.packed, tensor_of(op.source, sources).extents))
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


def full(name: str, sources: Sources) -> torch.Tensor:
    """Return the tensor "<input>:<key>" as a whole, in fp32."""
    import torch

    info = tensor_of(name, sources)
    stored = torch.from_numpy(read_all(info)).view(torch_dtype(info.dtype))
    return stored.reshape(info.shape).float()


def _apply(
    term: Term, block: torch.Tensor, start: int, operand: Callable[[str], torch.Tensor]
) -> torch.Tensor:
    """Apply a term in place to the fp32 rows of a tensor from `start` on, experts flattened."""
    import torch

    if isinstance(term, Rows):
        rows = torch.tensor(term.indices) - start
        inside = (rows >= 0) & (rows < len(block))
        block[rows[inside]] = operand(term.values)[inside]
        return block
    a, b = operand(term.a), operand(term.b)
    first = start + term.out_start
    if term.experts == 1 or term.expert is not None:
        block.add_(_product(term, first, len(block), *term.factors(a, b)))
    else:
        height, row = a.shape[1] if term.transpose else b.shape[0], 0
        while row < len(block):
            expert, low = divmod(start + row, height)
            count = min(height - low, len(block) - row)
            block[row : row + count] += _product(term, low, count, *term.factors(a, b, expert))
            row += count
    if not term.magnitude:
        return block
    magnitude = operand(term.magnitude)[first:][: len(block)]
    return block.mul_((magnitude / torch.linalg.vector_norm(block, dim=1)).unsqueeze(1))


def _product(
    term: LowRank, first: int, count: int, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """Return rows `[first, first + count)` of one expert's scaled product."""
    height = a.shape[1] if term.transpose else b.shape[0]
    low, high = first, first + count
    if count == 1 < height:  # for a single row BLAS sums in another order: compute two
        low = min(first, height - 2)
        high = low + 2
    # Transposed after the product, like peft: the order of summation is then the same.
    product = (b @ a[:, low:high]).T if term.transpose else b[low:high] @ a
    return product[first - low : first - low + count].mul_(term.scale)


# By the C kernel.


def _kernel_term(op: Op, sources: Sources) -> LowRank | None:
    """Return the operation's only term if the kernel supports it; None if torch has to compute it.

    Products of a single row or column are left to torch: BLAS sums them in another order.
    """
    special = op.transpose or op.encoding is not None or op.is_decoded
    if special or (op.source_dtype, op.dtype) != ("BF16", "BF16"):
        return None
    if len(op.terms) != 1 or len(op.shape) != 2 or min(op.shape) < 2:
        return None
    (term,) = op.terms
    if not isinstance(term, LowRank) or term.transpose or term.experts != 1 or term.magnitude:
        return None
    a, b = (tensor_of(name, sources) for name in (term.a, term.b))
    plain = {a.dtype, b.dtype} <= set(NUMPY)
    kernels = library() if plain and a.shape[0] <= MAX_RANK and b.shape[0] > 1 else None
    return term if kernels is not None and kernels.folds else None


def _size_of_a(term: LowRank, sources: Sources) -> int:
    info = tensor_of(term.a, sources)
    return prod(info.shape) * (2 if info.dtype == "BF16" else 4)


def _fold(op: Op, term: LowRank, sources: Sources, written: Written) -> Blocks:
    kernels = library()
    assert kernels is not None
    (rows, columns), changed = op.shape, 0
    blocks = list(row_blocks(rows, columns, max(0, MEMORY - _size_of_a(term, sources)) // 2))
    largest = max(end - first for first, end in blocks)
    base: NDArray[np.uint16] = np.empty((largest, columns), np.uint16)
    out: NDArray[np.uint16] = np.empty((largest, columns), np.uint16)
    a_info, b_info = (tensor_of(name, sources) for name in (term.a, term.b))
    # bf16 stays 16-bit words, which the kernel widens.
    raw = read_all(a_info)
    words = raw.view(np.uint16) if a_info.dtype == "BF16" else widened(raw, a_info.dtype)
    a = words.reshape(a_info.shape)
    row = b_info.shape[1] * ITEM_BITS[b_info.dtype] // 8
    with opened(op, sources) as source, Reader(b_info.extents) as reader:
        for first, end in blocks:
            count = end - first
            raw = reader.read((first + term.out_start) * row, count * row)
            source.into(base[:count].view(np.uint8).reshape(-1), first * columns * 2)
            folded = kernels.fold(
                base[:count],
                out[:count],
                a=a,
                b=widened(raw, b_info.dtype).reshape(count, -1),
                scale=term.scale,
                keys=row_keys(op.name, first, count) if op.unbiased else None,
            )
            changed += folded.changed
            for name in ("nonfinite", "update", "kept", "nearest"):
                setattr(written, name, getattr(written, name) + getattr(folded, name))
            yield out[:count].view(np.uint8).reshape(-1)
    written.changed = changed / (rows * columns)
