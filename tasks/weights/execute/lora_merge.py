"""Merge LoRA into bf16 matrices without torch: a C kernel does this common case in one pass.

The kernel sums products in order, scales and adds in fp32, and rounds once (`rounding.py`): the
result is the same on every CPU. torch (`kernels.py`) gives the same bits where its BLAS sums in
order (MKL on Intel up to 384 terms, on AMD up to 192); elsewhere it differs only in sums that lie
between two numbers.
Operations that the kernel does not support, and machines without a compiler, use torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.contract import TensorLike
from tasks.weights.execute.compute import row_blocks
from tasks.weights.execute.copying import Buffer, Workspace, opened
from tasks.weights.execute.outcome import Measured
from tasks.weights.files.dtypes import ITEM_BITS, NUMPY, cast
from tasks.weights.files.source import Reader, Source, extents_of, info_of
from tasks.weights.native import library
from tasks.weights.native.binding import MAX_RANK
from tasks.weights.plan import LowRank, Op
from tasks.weights.rounding import row_keys

SLOT = 7 << 18
"""Target for the memory of one tensor in progress, in bytes: all of A, and as many rows as fit.
Memory therefore does not grow with a model's width until A alone exceeds it."""


def fold_term(op: Op, sources: Mapping[str, Source]) -> LowRank | None:
    """Return the operation's only term if the kernel supports it; None if torch has to compute it.

    Products of a single row or column are left to torch: BLAS sums them in another order.
    """
    if len(op.terms) != 1 or len(op.shape) != 2 or min(op.shape) < 2 or _is_special(op):
        return None
    (term,) = op.terms
    if not isinstance(term, LowRank) or term.transpose or term.experts != 1:
        return None
    a, b = (info_of(name, sources) for name in (term.a, term.b))
    plain = term.a_rows is None and term.b_columns is None and {a.dtype, b.dtype} <= set(NUMPY)
    kernels = library() if plain and a.shape[0] <= MAX_RANK and b.shape[0] > 1 else None
    return term if kernels is not None and kernels.folds else None


def _is_special(op: Op) -> bool:
    return (
        (op.source_dtype, op.dtype) != ("BF16", "BF16")
        or op.transpose
        or op.encoding is not None
        or op.is_decoded
    )


def size_of_a(term: LowRank, sources: Mapping[str, Source]) -> int:
    """Return the memory, in bytes, that the term's A takes while its tensor is computed."""
    info = info_of(term.a, sources)
    return prod(info.shape) * (2 if info.dtype == "BF16" else 4)


def fold(
    op: Op, term: LowRank, sources: Mapping[str, Source], workspace: Workspace, measured: Measured
) -> Iterator[NDArray[np.uint8]]:
    """Yield the merged tensor's bytes block by block; a block is valid until the next is requested.

    Args:
        op: an operation that `fold_term` accepts.
        term: the term that `fold_term` returned.
        sources: inputs of the plan by name.

    Raises:
        ArtifactError: a source cannot be read.
    """
    kernels = library()
    assert kernels is not None
    rows, columns = op.shape
    a_bytes = size_of_a(term, sources)
    blocks = list(row_blocks(rows, columns, max(0, SLOT - a_bytes) // 2))
    slot = workspace.out.first(a_bytes + 2 * columns * max(end - first for first, end in blocks))
    a = _whole_a(term, sources, slot[:a_bytes], workspace.read)
    with opened(op, sources) as base, Reader(extents_of(term.b, sources)) as reader:
        b = _Factors(reader, info_of(term.b, sources), term.out_start)
        for first, end in blocks:
            size = 2 * columns * (end - first)
            factors, raw = b.rows(first, end, workspace.read, size)
            base.into(raw, first * columns * 2)
            out = slot[a_bytes : a_bytes + size]
            words = raw.view(np.uint16).reshape(-1, columns)
            keys = row_keys(op.name, first, end - first) if op.unbiased else None
            folded = kernels.fold(
                words, out.view(np.uint16), a=a, b=factors, scale=term.scale, keys=keys
            )
            measured.changed += folded.changed
            measured.nonfinite += folded.nonfinite
            measured.delta += folded.update
            measured.kept += folded.kept
            measured.nearest += folded.nearest
            yield out


def _whole_a(
    term: LowRank, sources: Mapping[str, Source], target: NDArray[np.uint8], read: Buffer
) -> NDArray[Any]:
    """Load A, shape (rank, columns): bf16 as 16-bit words, which the kernel widens, else fp32."""
    info = info_of(term.a, sources)
    with Reader(extents_of(term.a, sources)) as reader:
        raw = target if reader.nbytes == target.size else read.first(reader.nbytes)
        reader.into(raw, 0)
    if info.dtype == "F16":
        cast(raw, info.dtype, "F32", target)
    return target.view(np.uint16 if info.dtype == "BF16" else np.float32).reshape(info.shape)


@dataclass(frozen=True)
class _Factors:
    """Reader of rows of B; row `start` of B belongs to the output's first row."""

    reader: Reader
    info: TensorLike
    start: int

    def rows(
        self, first: int, end: int, buffer: Buffer, more: int
    ) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """Return B for output rows `[first, end)`, shape (end - first, rank), and `more` bytes."""
        rank, item = self.info.shape[1], ITEM_BITS[self.info.dtype] // 8
        count = (end - first) * rank
        wide, stored = 4 * count, 4 * count + item * count
        memory = buffer.first(stored + more)
        self.reader.into(memory[wide:stored], (first + self.start) * rank * item)
        factors = cast(memory[wide:stored], self.info.dtype, "F32", memory[:wide])
        return factors.view(np.float32).reshape(-1, rank), memory[stored:]
