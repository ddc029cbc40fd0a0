"""LoRA into bf16 matrices without torch: the commonest operation, in one pass over every block.

The kernel gives the bits that torch's own sequence gives (`kernels.py`): product, scale and sum in
fp32, one rounding. What it cannot do, and every machine without a compiler, goes by torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from tasks.weights.blocks import row_blocks
from tasks.weights.buffers import Buffer, Workspace, pages
from tasks.weights.casts import NUMPY, cast
from tasks.weights.copying import opened
from tasks.weights.extents import Reader
from tasks.weights.header import ITEM_BITS
from tasks.weights.journal import Measured
from tasks.weights.native import Library, library
from tasks.weights.native.binding import PANEL
from tasks.weights.plan import Op
from tasks.weights.source import Source
from tasks.weights.terms import LowRank

MAX_RANK = 384
"""Up to here MKL sums the rank in one chain, as the kernel does; measured for ranks 1 to 1024."""


def fold_term(op: Op, sources: Mapping[str, Source]) -> LowRank | None:
    """The one term of an operation that is done here; None where torch has to do it.

    A product of a single row or column is torch's too: BLAS sums that in another order.
    """
    if len(op.terms) != 1 or len(op.shape) != 2 or min(op.shape) < 2 or _is_special(op):
        return None
    (term,) = op.terms
    if not isinstance(term, LowRank) or term.transpose or term.experts != 1:
        return None
    a, b = (_source(name, sources).tensors[_key(name)] for name in (term.a, term.b))
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


def panel_bytes(term: LowRank, sources: Mapping[str, Source]) -> int:
    """Memory that the term's A takes while its tensor is made."""
    rank, columns = _source(term.a, sources).tensors[_key(term.a)].shape
    return 4 * rank * -(-columns // PANEL) * PANEL


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
    panels = _panels(kernels, term, sources, room.read)
    with opened(op, sources) as base, _reader(term.b, sources) as b:
        for first, end in row_blocks(rows, columns):
            size = (end - first) * columns * 2
            factors = _rows_of_b(b, term, sources, first + term.out_start, end - first)
            raw = room.read.first(size)
            base.into(raw, first * columns * 2)
            out = room.out.first(size)
            changed, nonfinite = kernels.fold(
                raw.view(np.uint16).reshape(-1, columns),
                out.view(np.uint16),
                b=factors,
                panels=panels,
                scale=term.scale,
            )
            found.changed += changed
            found.nonfinite += nonfinite
            yield out


def _panels(
    kernels: Library, term: LowRank, sources: Mapping[str, Source], read: Buffer
) -> NDArray[np.float32]:
    info = _source(term.a, sources).tensors[_key(term.a)]
    with _reader(term.a, sources) as reader:
        raw = read.first(reader.nbytes)
        reader.into(raw, 0)
    if info.dtype == "BF16":
        a = raw.view(np.uint16)
    else:
        a = cast(raw, info.dtype, "F32").view(np.float32)
    panels = pages(panel_bytes(term, sources)).view(np.float32)
    kernels.pack(a.reshape(info.shape), panels)
    return panels


def _rows_of_b(
    reader: Reader, term: LowRank, sources: Mapping[str, Source], first: int, count: int
) -> NDArray[np.float32]:
    info = _source(term.b, sources).tensors[_key(term.b)]
    rank, item = info.shape[1], ITEM_BITS[info.dtype] // 8
    raw: NDArray[np.uint8] = np.empty(count * rank * item, np.uint8)
    reader.into(raw, first * rank * item)
    return cast(raw, info.dtype, "F32").view(np.float32).reshape(count, rank)


def _reader(name: str, sources: Mapping[str, Source]) -> Reader:
    return Reader(_source(name, sources).extents(_key(name)))


def _source(name: str, sources: Mapping[str, Source]) -> Source:
    return sources[name.partition(":")[0]]


def _key(name: str) -> str:
    return name.partition(":")[2]
