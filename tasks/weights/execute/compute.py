"""One computed tensor: block by block from its source through its terms to its final offset.

Terms are added in fp32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tasks.weights.execute.copying import opened
from tasks.weights.execute.full_tensors import Sources, all_rows, squared, whole
from tasks.weights.execute.journal import Measured
from tasks.weights.files import dtype_bits as bits
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.header import ITEM_BITS
from tasks.weights.files.reader import torch_dtype
from tasks.weights.plan.operations import Op

if TYPE_CHECKING:
    import torch


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


def compute(op: Op, sources: Sources, found: Measured) -> Iterator[NDArray[np.uint8]]:
    """One output tensor's bytes, block by block; each is good until the next one is asked for.

    Peak memory is a few blocks, but for what `wholes.needs_whole`.

    Args:
        op: of kind "compute".
        sources: the inputs.
        found: counts what is seen.

    Raises:
        ArtifactError: a source that cannot be read.
    """
    adapter = _Operands(sources)
    rows, columns = matrix_shape(op.read_shape)
    for first, block, seen in _blocks(op, sources, rows, columns, found):
        # A copy even of fp32: terms work in place, and what was there is compared with afterwards.
        wide = _with_terms(op, block.to(_fp32(), copy=bool(op.terms)), first, adapter, found)
        out = _stored(op, wide)
        raw = _bytes(out)
        found.nonfinite += bits.nonfinite(raw, op.dtype)
        if op.terms:
            found.changed += _differing(raw, _bytes(seen.to(out.dtype)), op.dtype)
        yield raw


def _stored(op: Op, wide: torch.Tensor) -> torch.Tensor:
    """Rounded once to what is written."""
    if op.encoding is None:
        return wide.to(torch_dtype(op.dtype))
    from tasks.weights.quantized.encode import encode

    return encode(op.encoding, wide)


def _with_terms(
    op: Op, wide: torch.Tensor, first: int, operands: _Operands, found: Measured
) -> torch.Tensor:
    from tasks.weights.execute.kernels import apply

    before = wide.clone() if found.error is not None and op.terms else None
    vector = len(op.shape) < 2
    wide = wide.reshape(-1) if vector else wide
    for term in op.terms:
        wide = apply(term, wide, start=first, operand=operands)
    if before is not None:
        found.delta = (found.delta or 0.0) + squared(wide.reshape(before.shape) - before)
    return wide


def _blocks(
    op: Op, sources: Sources, rows: int, columns: int, found: Measured
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Of every block: its first row, what terms are added to, what counts as unchanged."""
    import torch

    pieces = [(0, rows)] if all_rows(op) else list(row_blocks(rows, columns))
    if op.quantization is not None or op.transpose:
        matrix = whole(op, sources, found).reshape(rows, columns)
        for first, end in pieces:
            yield first, matrix[first:end], matrix[first:end]
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
            yield first, block.reshape(-1, columns), block.reshape(-1, columns)


class _Operands:
    """Adapter tensors of one operation, whole, in fp32: read once, small."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._held: dict[str, torch.Tensor] = {}

    def __call__(self, name: str) -> torch.Tensor:
        import torch

        if name not in self._held:
            input_name, _, key = name.partition(":")
            source = self._sources[input_name]
            info = source.tensors[key]
            with Reader(source.extents(key)) as reader:
                buffer: NDArray[np.uint8] = np.empty(reader.nbytes, np.uint8)
                reader.into(buffer, 0)
            stored = torch.from_numpy(buffer).view(torch_dtype(info.dtype))
            self._held[name] = stored.reshape(tuple(info.shape)).float()
        return self._held[name]


def _bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    import torch

    found: NDArray[np.uint8] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return found


def _fp32() -> torch.dtype:
    import torch

    return torch.float32


def _differing(one: NDArray[np.uint8], other: NDArray[np.uint8], dtype: str) -> int:
    """How many elements have other bits."""
    word = f"<u{ITEM_BITS[dtype] // 8}"
    return int(np.count_nonzero(one.view(word) != other.view(word)))
