"""Merge LoRA into bf16 matrices without torch: a C kernel does this common case in one pass.

The kernel sums products in order, scales and adds in fp32, and rounds once (`rounding.py`): the
result is the same on every CPU. torch (`compute.py`) gives the same bits where its BLAS sums in
order (MKL on Intel up to 384 terms, on AMD up to 192); elsewhere it differs only in sums that lie
between two numbers.
Operations that the kernel does not support, and machines without a compiler, use torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import numpy as np
from numpy.typing import NDArray

from tasks.weights.execute.compute import opened
from tasks.weights.execute.outcome import Written
from tasks.weights.files.dtypes import ITEM_BITS, NUMPY, widened
from tasks.weights.files.tensors import Reader, Sources, tensor_of
from tasks.weights.native import library
from tasks.weights.native.binding import MAX_RANK
from tasks.weights.plan import LowRank, Op, row_blocks
from tasks.weights.rounding import row_keys

MEMORY = 7 << 18
"""Target for the memory of one tensor in progress, in bytes: all of A, and as many rows as fit.
Memory therefore does not grow with a model's width until A alone exceeds it."""


def fold_term(op: Op, sources: Sources) -> LowRank | None:
    """Return the operation's only term if the kernel supports it; None if torch has to compute it.

    Products of a single row or column are left to torch: BLAS sums them in another order.
    """
    special = op.transpose or op.encoding is not None or op.is_decoded
    if special or (op.source_dtype, op.dtype) != ("BF16", "BF16"):
        return None
    if len(op.terms) != 1 or len(op.shape) != 2 or min(op.shape) < 2:
        return None
    (term,) = op.terms
    if not isinstance(term, LowRank) or term.transpose or term.experts != 1:
        return None
    a, b = (tensor_of(name, sources) for name in (term.a, term.b))
    plain = term.a_rows is None and term.b_columns is None and {a.dtype, b.dtype} <= set(NUMPY)
    kernels = library() if plain and a.shape[0] <= MAX_RANK and b.shape[0] > 1 else None
    return term if kernels is not None and kernels.folds else None


def size_of_a(term: LowRank, sources: Sources) -> int:
    """Return the memory, in bytes, that the term's A takes while its tensor is computed."""
    info = tensor_of(term.a, sources)
    return prod(info.shape) * (2 if info.dtype == "BF16" else 4)


def fold(op: Op, term: LowRank, sources: Sources, written: Written) -> Iterator[NDArray[np.uint8]]:
    """Yield the merged tensor's bytes block by block; a block is valid until the next is requested.

    Args:
        op: an operation that `fold_term` accepts.
        term: the term that `fold_term` returned.
        sources: inputs of the plan by name.
        written: gets the statistics of the tensor.

    Raises:
        ArtifactError: a source cannot be read.
    """
    kernels = library()
    assert kernels is not None
    (rows, columns), changed = op.shape, 0
    blocks = list(row_blocks(rows, columns, max(0, MEMORY - size_of_a(term, sources)) // 2))
    largest = max(end - first for first, end in blocks)
    base: NDArray[np.uint16] = np.empty((largest, columns), np.uint16)
    out: NDArray[np.uint16] = np.empty((largest, columns), np.uint16)
    a_info, b_info = (tensor_of(name, sources) for name in (term.a, term.b))
    assert a_info.shape == (b_info.shape[1], columns), "the kernel reads memory by these sizes"
    with Reader(tensor_of(term.a, sources).extents) as reader:
        # bf16 stays 16-bit words, which the kernel widens.
        raw = reader.read()
        words = raw.view(np.uint16) if a_info.dtype == "BF16" else widened(raw, a_info.dtype)
        a = words.reshape(a_info.shape)
    row = b_info.shape[1] * ITEM_BITS[b_info.dtype] // 8
    with opened(op, sources) as source, Reader(tensor_of(term.b, sources).extents) as reader:
        for first, end in blocks:
            count = end - first
            factors = widened(
                reader.read((first + term.out_start) * row, count * row), b_info.dtype
            )
            source.into(base[:count].view(np.uint8).reshape(-1), first * columns * 2)
            folded = kernels.fold(
                base[:count],
                out[:count],
                a=a,
                b=factors.reshape(count, -1),
                scale=term.scale,
                keys=row_keys(op.name, first, count) if op.unbiased else None,
            )
            changed += folded.changed
            written.nonfinite += folded.nonfinite
            written.update += folded.update
            written.kept += folded.kept
            written.nearest += folded.nearest
            yield out[:count].view(np.uint8).reshape(-1)
    written.changed = changed / (rows * columns)
