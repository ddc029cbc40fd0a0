"""LoRA into bf16 matrices without torch: the commonest operation, in one pass over every block.

The kernel sums products in order, scales and adds in fp32, and rounds once: one result on every
CPU. torch's own sequence (`kernels.py`) gives the same bits where its BLAS sums in order (MKL on
Intel up to 384 terms, on AMD up to 192), elsewhere all but those of sums that lie between two
numbers. What the kernel cannot do, and every machine without a compiler, goes by torch.
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
from tasks.weights.execute.journal import Measured
from tasks.weights.files.dtype_conversion import NUMPY, cast
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.header import ITEM_BITS
from tasks.weights.files.source import Source
from tasks.weights.native import library
from tasks.weights.native.binding import MAX_RANK
from tasks.weights.plan.adapter_ops import LowRank
from tasks.weights.plan.operations import Op

SLOT = 7 << 18
"""Bytes that one tensor in the making works in: all of A, and a block of rows as large as still
fits. So memory does not grow with a model's width, until A alone needs more than this."""


def fold_term(op: Op, sources: Mapping[str, Source]) -> LowRank | None:
    """The one term of an operation that is done here; None where torch has to do it.

    A product of a single row or column is torch's too: BLAS sums that in another order.
    """
    if len(op.terms) != 1 or len(op.shape) != 2 or min(op.shape) < 2 or _is_special(op):
        return None
    (term,) = op.terms
    if not isinstance(term, LowRank) or term.transpose or term.experts != 1:
        return None
    a, b = (_info(name, sources) for name in (term.a, term.b))
    plain = term.a_rows is None and term.b_columns is None and {a.dtype, b.dtype} <= set(NUMPY)
    kernels = library() if plain and a.shape[0] <= MAX_RANK and b.shape[0] > 1 else None
    return term if kernels is not None and kernels.folds else None


def _is_special(op: Op) -> bool:
    return (
        (op.source_dtype, op.dtype) != ("BF16", "BF16")
        or op.transpose
        or op.encoding is not None
        or op.quantization is not None
    )


def held_bytes(term: LowRank, sources: Mapping[str, Source]) -> int:
    """Memory that the term's A takes while its tensor is made."""
    info = _info(term.a, sources)
    return prod(info.shape) * (2 if info.dtype == "BF16" else 4)


def fold(
    op: Op, term: LowRank, sources: Mapping[str, Source], room: Workspace, found: Measured
) -> Iterator[NDArray[np.uint8]]:
    """The output's bytes block by block; each is good until the next one is asked for.

    Args:
        op: what `fold_term` took.
        term: what it gave.
        sources: the inputs.
        room: memory to work in.
        found: counts what is seen.

    Raises:
        ArtifactError: a source that cannot be read.
    """
    kernels = library()
    assert kernels is not None
    rows, columns = op.shape
    held = held_bytes(term, sources)
    blocks = list(row_blocks(rows, columns, max(0, SLOT - held) // 2))
    slot = room.out.first(held + 2 * columns * max(end - first for first, end in blocks))
    a = _whole_a(term, sources, slot[:held], room.read)
    with opened(op, sources) as base, _reader(term.b, sources) as reader:
        b = _Factors(reader, _info(term.b, sources), term.out_start)
        for first, end in blocks:
            size = 2 * columns * (end - first)
            factors, raw = b.rows(first, end, room.read, size)
            base.into(raw, first * columns * 2)
            out = slot[held : held + size]
            words = raw.view(np.uint16).reshape(-1, columns)
            changed, nonfinite = kernels.fold(
                words, out.view(np.uint16), a=a, b=factors, scale=term.scale
            )
            found.changed += changed
            found.nonfinite += nonfinite
            yield out


def _whole_a(
    term: LowRank, sources: Mapping[str, Source], target: NDArray[np.uint8], read: Buffer
) -> NDArray[Any]:
    """(rank, columns): bf16 as its 16 bits, which the kernel widens as it goes, others in fp32."""
    info = _info(term.a, sources)
    with _reader(term.a, sources) as reader:
        raw = target if reader.nbytes == target.size else read.first(reader.nbytes)
        reader.into(raw, 0)
    if info.dtype == "F16":
        cast(raw, info.dtype, "F32", target)
    return target.view(np.uint16 if info.dtype == "BF16" else np.float32).reshape(info.shape)


@dataclass(frozen=True)
class _Factors:
    """B, of which row `start` belongs to the output's first."""

    reader: Reader
    info: TensorLike
    start: int

    def rows(
        self, first: int, end: int, room: Buffer, more: int
    ) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
        """The factors of output rows `[first, end)`, (end - first, rank), and `more` bytes."""
        rank, item = self.info.shape[1], ITEM_BITS[self.info.dtype] // 8
        count = (end - first) * rank
        wide, stored = 4 * count, 4 * count + item * count
        held = room.first(stored + more)
        self.reader.into(held[wide:stored], (first + self.start) * rank * item)
        found = cast(held[wide:stored], self.info.dtype, "F32", held[:wide])
        return found.view(np.float32).reshape(-1, rank), held[stored:]


def _reader(name: str, sources: Mapping[str, Source]) -> Reader:
    return Reader(_source(name, sources).extents(_key(name)))


def _info(name: str, sources: Mapping[str, Source]) -> TensorLike:
    return _source(name, sources).tensors[_key(name)]


def _source(name: str, sources: Mapping[str, Source]) -> Source:
    return sources[name.partition(":")[0]]


def _key(name: str) -> str:
    return name.partition(":")[2]
