"""Compute the expected tensors of a merge, block by block, with numpy alone.

Independent of `tasks/weights/execute`, which merges: a proof must not share its arithmetic with the
code that it checks. The audit computes every row in fp32, a merge of ours sampled rows in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasks.weights.execute.compute import matrix_shape, row_blocks
from tasks.weights.files.dtypes import DTYPE_NAMES, ITEM_BITS, MANTISSA, NUMPY, widened
from tasks.weights.files.source import Reader, Source, extents_of, info_of, part
from tasks.weights.plan import (
    Add,
    Dora,
    LowRank,
    Op,
    Rows,
    Term,
    as_slice,
    needs_all_rows,
    operands,
)

Array: TypeAlias = NDArray[Any]
Sources = Mapping[str, Source]

_PIECES, _PIECE_ROWS = 8, 8
"""Sampled rows of a tensor: number of evenly spaced pieces, and rows per piece."""
_PRODUCT_BITS = 9
"""Least precision of a product in an fp32 merge: GPUs may multiply in TF32 (10 bits)."""


@dataclass(frozen=True)
class Part:
    """Product `left @ right` that a term adds to some rows of a block."""

    rows: slice
    left: Array  # times the term's scale, shape (rows, rank)
    right: Array  # shape (rank, columns)
    roundings: int  # most roundings of one element in an fp32 merge


@dataclass(frozen=True)
class Block:
    """Rows `[first, end)` of one tensor: base and change of shape (rows, columns)."""

    first: int
    base: Array
    change: Array
    parts: tuple[Part, ...] = ()  # products of the change, for bounds of its rounding error
    # factor of DoRA by row, (rows, 1), or by column, (1, columns); None without DoRA
    stretch: Array | None = None

    @property
    def end(self) -> int:
        """Row after the last one."""
        return self.first + len(self.base)

    @cached_property
    def norms(self) -> list[tuple[Array, Array]]:
        """Norms of rows and columns by part; their outer product bounds its magnitude."""
        pairs = []
        for product in self.parts:
            left = np.zeros(len(self.base), self.base.dtype)
            left[product.rows] = np.linalg.norm(product.left, axis=1)
            pairs.append((left, np.linalg.norm(product.right, axis=0)))
        return pairs

    def bound(self, rows: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.float64]:
        """Return a bound of the change's magnitude at some elements."""
        total = np.zeros(len(rows))
        for left, right in self.norms:
            total += left[rows].astype(np.float64) * right[columns]
        return total


def comparable(op: Op, sources: Sources) -> str:
    """Return the reason why a tensor cannot be computed here; "" if it can."""
    if op.encoding is not None:
        return f"stored as {op.encoding.scheme}"
    if op.packed is None and op.source_dtype not in NUMPY:
        return f"the base holds it in {op.source_dtype}"
    for name in (name for term in op.terms for name in operands(term)):
        dtype = info_of(name, sources).dtype
        if dtype not in NUMPY:
            return f"{name.partition(':')[2]} is {dtype}"
    return ""


class Expected:
    """Expected value of one output tensor of a plan, computed in `dtype`."""

    def __init__(
        self, op: Op, sources: Sources, dtype: type[np.floating[Any]] = np.float32
    ) -> None:
        self.op, self.sources, self.dtype = op, sources, dtype
        self.rows, self.columns = matrix_shape(op.shape)
        self._operands: dict[str, Array] = {}

    @property
    def source_dtype(self) -> str:
        """Dtype of the base's values (safetensors name)."""
        packed = self.op.packed
        return self.op.source_dtype if packed is None else DTYPE_NAMES.get(packed["dtype"], "F32")

    @property
    def is_dora(self) -> bool:
        """True for DoRA: it divides by norms of the weight, whose rounding affects whole rows."""
        return any(isinstance(term, Dora) for term in self.op.terms)

    @property
    def needs_all_rows(self) -> bool:
        """True if a term takes norms of columns: a block then has to hold all rows."""
        return any(map(needs_all_rows, self.op.terms))

    @property
    def precision(self) -> float:
        """Largest relative rounding error of a product of factors."""
        dtypes = [self.source_dtype, self.op.dtype]
        bits = min([MANTISSA.get(dtype, 23) for dtype in dtypes] + [_PRODUCT_BITS])
        return 2.0**-bits

    def sampled_rows(self) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of evenly spaced rows, some of each expert; all of a small tensor."""
        shape = self.op.shape
        count = max(_PIECES, prod(shape[:-2]) if len(shape) > 2 else 1)
        if self.needs_all_rows or self.rows <= count * _PIECE_ROWS:
            yield 0, self.rows
            return
        for number in range(count):
            first = number * (self.rows - _PIECE_ROWS) // (count - 1)
            yield first, first + _PIECE_ROWS

    def all_rows(self, *, whole: bool = False) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of blocks of all rows; of one block if `whole` or needed."""
        if whole or self.needs_all_rows:
            return iter([(0, self.rows)])
        return row_blocks(self.rows, self.columns)

    def blocks(
        self, cuts: Iterable[tuple[int, int]], read: Callable[[int, int], Array] | None = None
    ) -> Iterator[Block]:
        """Yield blocks of rows; `read` returns rows of another base than the stored one."""
        if read is not None:
            yield from (self.changed(first, read(first, end)) for first, end in cuts)
            return
        with BaseRows(self.op, self.sources) as base:
            for first, end in cuts:
                yield self.changed(first, base.rows(first, end))

    def changed(self, first: int, base: Array) -> Block:
        """Apply the terms to some rows of the base, of which `first` is the first."""
        base = base.astype(self.dtype, copy=False)
        block = Block(first, base, np.zeros_like(base))
        for term in self.op.terms:
            block = self._with(term, block)
        return block

    def _with(self, term: Term, block: Block) -> Block:
        first, rows, base, change = block.first, len(block.base), block.base, block.change
        match term:
            case LowRank():
                product, parts = self._product(term, first, rows)
                return replace(block, change=change + product, parts=(*block.parts, *parts))
            case Dora():
                plain = LowRank(
                    term.a, term.b, term.scale, term.transpose, out_start=term.out_start
                )
                product, parts = self._product(plain, first, rows)
                total = base + change + product
                magnitude = self._operand(term.magnitude).reshape(-1)
                if not term.transpose:
                    magnitude = magnitude[first + term.out_start :][:rows]
                axis = 0 if term.transpose else 1
                norm = np.sqrt(np.square(total, dtype=np.float64).sum(axis=axis))
                factor = np.expand_dims((magnitude / norm).astype(self.dtype), axis)
                if term.transpose:
                    parts = [replace(p, right=p.right * factor) for p in parts]
                else:
                    parts = [replace(p, left=p.left * factor[p.rows]) for p in parts]
                return Block(first, base, total * factor - base, tuple(parts), factor)
            case Rows():
                picked = np.array(term.indices, np.int64) - first
                inside = (picked >= 0) & (picked < rows)
                values = self._operand(term.values)[inside].reshape(-1, base.shape[1])
                change[picked[inside]] = values - base[picked[inside]]
                return block
            case Add():
                value = self._operand(term.value).reshape(-1, base.shape[1])[first : first + rows]
                value = value * self.dtype(term.scale)
                ones = np.ones((1, base.shape[1]), self.dtype)
                parts = [Part(slice(0, rows), value[:, :1], ones, roundings=2)]
                return replace(block, change=change + value, parts=(*block.parts, *parts))

    def _product(self, term: LowRank, first: int, rows: int) -> tuple[Array, list[Part]]:
        """Return `scale * B A` of these rows, and its factors; a stack of experts has several."""
        a, b = self._operand(term.a), self._operand(term.b)
        height = a.shape[1] if term.transpose else b.shape[0]
        products, parts, at = [], [], 0
        while at < rows:
            low, plain = first + at + term.out_start, term
            if term.experts > 1:
                expert, low = divmod(first + at, height)
                plain = term.of_expert(expert, len(a))
            count = min(height - low, rows - at)
            left, right = factors(plain, a, b, low, count)
            scale = self.dtype(term.scale)
            products.append((left @ right) * scale)
            here = slice(at, at + count)
            parts.append(Part(here, left * scale, right, roundings=len(right) + 2))
            at += count
        return products[0] if len(products) == 1 else np.concatenate(products), parts

    def _operand(self, name: str) -> Array:
        if name not in self._operands:
            info = info_of(name, self.sources)
            with Reader(extents_of(name, self.sources)) as reader:
                values = widened(reader.read(), info.dtype).reshape(tuple(info.shape))
            self._operands[name] = values.astype(self.dtype, copy=False)
        return self._operands[name]


def factors(
    term: LowRank, a: NDArray[Any], b: NDArray[Any], first: int, count: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the factors of some rows of `B A`: shapes (count, rank) and (rank, columns).

    `a` is lora_A, shape (rank, in), and `b` lora_B, shape (out, rank), of one matrix.
    """
    a, b = a[as_slice(term.a_rows)], b[:, as_slice(term.b_columns)]
    if term.transpose:
        return a[:, first : first + count].T, b.T
    return b[first : first + count], a


class BaseRows:
    """Read the base's values of an operation by rows in fp32; a context manager.

    A base that is stored in 4 bits is decoded, a transposed one is turned. A base that training
    quantized is read as it is stored.
    """

    def __init__(self, op: Op, sources: Sources) -> None:
        self._dtype, self._columns = op.source_dtype, matrix_shape(op.shape)[1]
        self._matrix: Array | None = None
        self._reader, source, count = Reader([]), sources[op.input], prod(op.shape)
        if op.packed is not None:
            from tasks.weights.quantized.source import decoded_values

            values = decoded_values(op.packed, source.extents(op.key)).reshape(-1)
            self._matrix = _turned(op, values[op.start : op.start + count])
            return
        item = ITEM_BITS[self._dtype] // 8
        self._reader = Reader(part(source.extents(op.key), op.start * item, count * item))
        if op.transpose:
            self._matrix = _turned(op, self._read(0, count * item))

    def __enter__(self) -> BaseRows:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.__exit__()

    def rows(self, first: int, end: int) -> Array:
        """Return rows `[first, end)`, shape (end - first, columns)."""
        if self._matrix is not None:
            return self._matrix[first:end]
        row = self._columns * ITEM_BITS[self._dtype] // 8
        return self._read(first * row, (end - first) * row).reshape(-1, self._columns)

    def _read(self, at: int, nbytes: int) -> Array:
        return widened(self._reader.read(at, nbytes), self._dtype)


def _turned(op: Op, values: Array) -> Array:
    """Return 1-D values as rows of the output; the source may be stored transposed."""
    if op.transpose:
        *stack, rows, columns = op.shape
        values = np.ascontiguousarray(values.reshape(*stack, columns, rows).swapaxes(-1, -2))
    return values.reshape(-1, matrix_shape(op.shape)[1])


def of_expert(op: Op, index: int, rows_of_a: Mapping[str, int]) -> Op:
    """Return the operation of one matrix of a stack of shape (experts, rows, columns).

    `rows_of_a` has the first axis of every lora_A that its terms name.
    """
    size = prod(op.shape[1:])
    terms = tuple(
        term.of_expert(index, rows_of_a[term.a]) if isinstance(term, LowRank) else term
        for term in op.terms
    )
    return replace(op, shape=op.shape[1:], start=op.start + index * size, terms=terms)
