"""Expected values of a merge, by numpy alone: blocks of `base + scale * B A`, and their rounding.

for block in blocks(op, sources, np.float64, sampled=True):
    block.base + block.change, written.rows(block.first, block.first + len(block.base))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasks.weights.files.dtypes import ITEM_BITS, NUMPY, rounded, widened
from tasks.weights.files.tensors import Reader, Sources, Tensor, part, read_all, tensor_of
from tasks.weights.plan import LowRank, Op, Rows, Term, matrix_shape, operands, row_blocks
from tasks.weights.rounding import GRIDS, TWO_STEPS, row_keys

Array: TypeAlias = NDArray[Any]

_PIECES, _PIECE_ROWS = 8, 8
"""Sampled rows of a tensor: number of evenly spaced pieces, and rows per piece."""


def comparable(op: Op, sources: Sources) -> str:
    """Return the reason why a tensor cannot be computed here; "" if it can."""
    if op.encoding is not None:
        return f"stored as {op.encoding.scheme}"
    if op.packed is None and op.source_dtype not in NUMPY:
        return f"the base holds it in {op.source_dtype}"
    for name in (name for term in op.terms for name in operands(term)):
        dtype = tensor_of(name, sources).dtype
        if dtype not in NUMPY:
            return f"{name.partition(':')[2]} is {dtype}"
    return ""


class Values:
    """Rows of a stored tensor, or of a part of it, in fp32; a context manager.

    A tensor that is stored in 4 bits is decoded; a transposed one is turned.
    """

    def __init__(
        self, tensor: Tensor, shape: Sequence[int], start: int = 0, *, transpose: bool = False
    ) -> None:
        self.dtype, self._columns = tensor.dtype, matrix_shape(tuple(shape))[1]
        self._matrix: Array | None = None
        self._reader, count = Reader([]), prod(shape)
        if tensor.packed is not None:
            from tasks.weights.quantized.packed import decoded

            flat = decoded(tensor.packed, tensor.extents).reshape(-1)[start : start + count]
            self._matrix = flat.reshape(-1, self._columns)
        else:
            item = ITEM_BITS[tensor.dtype] // 8
            self._reader = Reader(part(tensor.extents, start * item, count * item))
        if transpose:
            *stack, rows, columns = shape
            flat = self.rows(0, count // columns)
            turned = flat.reshape(*stack, columns, rows).swapaxes(-1, -2)
            self._matrix = np.ascontiguousarray(turned).reshape(-1, columns)

    def __enter__(self) -> Values:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.__exit__()

    def rows(self, first: int, end: int) -> Array:
        """Return rows `[first, end)`, shape (end - first, columns)."""
        if self._matrix is not None:
            return self._matrix[first:end]
        row = self._columns * ITEM_BITS[self.dtype] // 8
        raw = self._reader.read(first * row, (end - first) * row)
        return widened(raw, self.dtype).reshape(-1, self._columns)

    @cached_property
    def grid(self) -> str:
        """Dtype in which its values are exact: fp32 files often hold a model merged in bf16."""
        if self.dtype != "F32":
            return self.dtype
        sample = self._reader.read(0, min(self._reader.nbytes, 1 << 16))
        return "F32" if np.any(sample.view(np.uint32) & 0xFFFF) else "BF16"


def base_of(op: Op, sources: Sources) -> Values:
    """Return the values that an operation starts from, as they are stored."""
    return Values(tensor_of(op.source, sources), op.shape, op.start, transpose=op.transpose)


@dataclass
class Block:
    """Rows of one tensor from `first` on; arrays have the shape (rows, columns)."""

    first: int
    base: Array
    change: Array
    # Norms of the rows and of the columns of the change's factors; their product bounds it
    norms: tuple[tuple[Array, Array], ...] = ()
    roundings: int = 0  # most roundings of one element of a product in an fp32 merge
    stretch: Array | None = None  # DoRA's factor by row, shape (rows, 1); None without DoRA

    @property
    def size(self) -> Array:
        """Bound of the magnitude of the products in the change."""
        total = np.zeros_like(self.base)
        for left, right in self.norms:
            total += np.outer(left, right)
        return total


def blocks(
    op: Op,
    sources: Sources,
    dtype: type[np.floating[Any]] = np.float32,
    *,
    sampled: bool = False,
    read: Callable[[int, int], Array] | None = None,
) -> Iterator[Block]:
    """Yield the base and the exact change of an output tensor, computed in `dtype`.

    Args:
        sampled: only some rows, evenly spaced.
        read: returns rows of another base than the stored one.
    """
    rows, columns = matrix_shape(op.shape)
    cuts = _sampled(op, rows) if sampled else list(row_blocks(rows, columns))
    adapter: dict[str, Array] = {}
    for name in (name for term in op.terms for name in operands(term)):
        info = tensor_of(name, sources)
        values = widened(read_all(info), info.dtype).reshape(info.shape)
        adapter[name] = values.astype(dtype, copy=False)
    with base_of(op, sources) as stored:
        for first, end in cuts:
            base = (read or stored.rows)(first, end).astype(dtype, copy=False)
            block = Block(first, base, np.zeros_like(base))
            for term in op.terms:
                _add(term, block, adapter)
            yield block


def _sampled(op: Op, rows: int) -> list[tuple[int, int]]:
    """Return (first, end) of evenly spaced rows, some of each expert; all of a small tensor."""
    count = max(_PIECES, prod(op.shape[:-2]) if len(op.shape) > 2 else 1)
    if rows <= count * _PIECE_ROWS:
        return [(0, rows)]
    starts = [number * (rows - _PIECE_ROWS) // (count - 1) for number in range(count)]
    return [(first, first + _PIECE_ROWS) for first in starts]


def _add(term: Term, block: Block, adapter: dict[str, Array]) -> None:
    """Add a term to the change of some rows."""
    first, base = block.first, block.base
    if isinstance(term, Rows):
        picked = np.array(term.indices, np.int64) - first
        inside = (picked >= 0) & (picked < len(base))
        values = adapter[term.values][inside].reshape(-1, base.shape[1])
        block.change[picked[inside]] = values - base[picked[inside]]
        return
    a, b = adapter[term.a], adapter[term.b]
    product, (left, right) = _product(term, first, len(base), a, b)
    block.change, block.norms = block.change + product, (*block.norms, (left, right))
    block.roundings = max(block.roundings, len(a) + 2)
    if not term.magnitude:
        return
    total = base + block.change
    magnitude = adapter[term.magnitude].reshape(-1)[first + term.out_start :][: len(base)]
    norm = np.sqrt(np.square(total, dtype=np.float64).sum(axis=1))
    block.stretch = (magnitude / norm).astype(base.dtype)[:, None]
    block.change = total * block.stretch - base
    block.norms = ((left * np.abs(block.stretch[:, 0]), right),)


def _product(
    term: LowRank, first: int, rows: int, a: Array, b: Array
) -> tuple[Array, tuple[Array, Array]]:
    """Return `scale * B A` of some rows, and the norms of its factors' rows and columns.

    A stack of experts has a pair of factors for each; the norms of columns are then the largest.
    """
    height = a.shape[1] if term.transpose else b.shape[0]
    scale, at = a.dtype.type(term.scale), 0
    products, lefts, rights = [], [], []
    while at < rows:
        expert, low = 0, first + at + term.out_start
        if term.experts > 1 and term.expert is None:
            expert, low = divmod(first + at, height)
        count = min(height - low, rows - at)
        right, left = term.factors(a, b, expert)
        if term.transpose:
            left, right = right.T, left.T
        left = left[low : low + count]
        products.append((left @ right) * scale)
        lefts.append(np.linalg.norm(left, axis=1) * np.abs(scale))
        rights.append(np.linalg.norm(right, axis=0))
        at += count
    return np.concatenate(products), (np.concatenate(lefts), np.max(rights, axis=0))


# Unbiased rounding in fp64: `tasks/weights/rounding.py` defines it.

_LARGEST = {"BF16": 2.0**128, "F16": 2.0**16}
"""From here on a magnitude is infinite, by dtype."""


def random_parts(name: str, first: int, rows: int, columns: int) -> NDArray[np.float64]:
    """Return `r / 65536` of rows `[first, first + rows)` of a tensor, shape (rows, columns)."""
    keys = row_keys(name, first, rows)[:, None]
    column: NDArray[np.uint64] = np.arange(columns, dtype=np.uint64)[None, :]
    word = np.uint64(0xFFFFFFFF)
    x = ((column >> np.uint64(1)) + (keys & word)) & word
    x = ((x ^ (x >> np.uint64(16))) * np.uint64(0x21F0AAAD)) & word
    x ^= x >> np.uint64(15)
    x = ((x ^ (keys >> np.uint64(32))) * np.uint64(0xD35A2D97)) & word
    x ^= x >> np.uint64(15)
    halves = np.where(column & np.uint64(1), x >> np.uint64(16), x & np.uint64(0xFFFF))
    parts: NDArray[np.float64] = halves.astype(np.float64) / 65536
    return parts


def round_with(values: Array, parts: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Round to a 16-bit dtype by random parts of a step; monotone in `values`."""
    with np.errstate(over="ignore", invalid="ignore"):
        wide = values.astype(np.float32)
        step = _step(wide, dtype)
        result = np.floor(np.abs(wide) / step + parts) * step
        near = rounded(wide, dtype).astype(np.float64)
    exact: NDArray[np.float64] = np.where(result < _LARGEST[dtype], np.copysign(result, wide), near)
    return exact


def small(update: Array, base: Array, dtype: str) -> NDArray[np.bool_]:
    """Return True for updates that are rounded without bias: below two steps of the base."""
    below: NDArray[np.bool_] = np.abs(update) < TWO_STEPS * _step(base, dtype)
    return below


def _step(values: Array, dtype: str) -> NDArray[np.float64]:
    """Return the distance of neighbouring numbers of a dtype at these magnitudes."""
    mantissa, least = GRIDS[dtype]
    number, exponent = np.frexp(values.astype(np.float64))
    power = np.where(number == 0, least, np.maximum(exponent - 1, least))
    step: NDArray[np.float64] = np.ldexp(1.0, power - mantissa)
    return step
