"""Compute the expected tensors of a merge, block by block, in fp32 with numpy alone.

Independent of `kernels.py`, which merges with torch: a proof must not share code with what it
checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasks.weights.execute.compute import matrix_shape, row_blocks
from tasks.weights.files.dtype_conversion import NUMPY, cast
from tasks.weights.files.file_ranges import Reader, part
from tasks.weights.files.header import ITEM_BITS
from tasks.weights.files.source import Source
from tasks.weights.plan.adapter_ops import Add, Dora, LowRank, Rows, Stride, Term, operands
from tasks.weights.plan.operations import Op
from tasks.weights.quantized.packed import STORED

Array: TypeAlias = NDArray[np.float32]
Sources = Mapping[str, Source]

MANTISSA = {"BF16": 7, "F16": 10, "F32": 23}
"""Explicit mantissa bits by dtype."""
_LEAST = {"BF16": -133, "F16": -24, "F32": -149}
_PRODUCT_BITS = 9
"""Least precision of a product in an fp32 merge: GPUs may multiply in TF32 (10 bits)."""


@dataclass(frozen=True)
class Block:
    """Rows `[first, first + len(base))` of one tensor.

    Attributes:
        first: first row.
        base: values of the base, fp32, shape (rows, columns).
        change: values that the adapter adds, same shape.
        slack: by low-rank term: norms of its rows and columns. Their outer product bounds the
            product's rounding error.
    """

    first: int
    base: Array
    change: Array
    slack: tuple[tuple[Array, Array], ...] = ()

    def bound(self, rows: NDArray[Any], columns: NDArray[Any]) -> NDArray[np.float64]:
        """Return a bound of the product's magnitude at some elements."""
        total = np.zeros(len(rows))
        for left, right in self.slack:
            total += left[rows].astype(np.float64) * right[columns]
        return total


class Expected:
    """Expected value of one output tensor of a plan.

    Args:
        op: its operation; split a stack of experts into matrices first (`of_expert`).
        sources: the inputs of the plan.

    Raises:
        ArtifactError: a source cannot be read.
    """

    def __init__(self, op: Op, sources: Sources) -> None:
        self.op = op
        self.sources = sources
        self.rows, self.columns = matrix_shape(op.shape)
        self._operands: dict[str, Array] = {}

    @property
    def source_dtype(self) -> str:
        """Dtype of the base's values (safetensors name)."""
        stored = (self.op.quantization or {}).get(STORED)
        if stored is None:
            return self.op.source_dtype
        return {"bfloat16": "BF16", "float16": "F16"}.get(stored["dtype"], "F32")

    @property
    def is_dora(self) -> bool:
        """True for DoRA: it divides by norms of the weight, whose rounding affects whole rows."""
        return any(isinstance(term, Dora) for term in self.op.terms)

    @property
    def precision(self) -> float:
        """Largest relative rounding error of a product of factors."""
        dtypes = [self.source_dtype, self.op.dtype]
        bits = min([MANTISSA.get(dtype, 23) for dtype in dtypes] + [_PRODUCT_BITS])
        return 2.0**-bits

    def blocks(self, *, whole: bool = False) -> Iterator[Block]:
        """All rows in order, a few at a time; one block where norms run down the columns."""
        whole |= any(isinstance(term, Dora) and term.transpose for term in self.op.terms)
        cuts = [(0, self.rows)] if whole else row_blocks(self.rows, self.columns)
        with _Base(self.op, self.sources) as base:
            for first, end in cuts:
                yield self._block(base, first, end)

    def block(self, first: int, end: int) -> Block:
        """Rows `[first, end)`; all of them where norms run down the columns."""
        with _Base(self.op, self.sources) as base:
            return self._block(base, first, end)

    def _block(self, base: _Base, first: int, end: int) -> Block:
        values = base.rows(first, end).reshape(-1, self.columns)
        change = np.zeros_like(values)
        slack: list[tuple[Array, Array]] = []
        for term in self.op.terms:
            change, more = self._with(term, values, change, first)
            slack += more
        return Block(first, values, change, tuple(slack))

    def _with(
        self, term: Term, base: Array, change: Array, first: int
    ) -> tuple[Array, list[tuple[Array, Array]]]:
        """Return the change after one more term, and the norms that bound its rounding error."""
        rows = len(base)
        match term:
            case LowRank():
                product, slack = self._product(term, first, rows)
                change += product
                return change, [slack]
            case Dora():
                plain = LowRank(term.a, term.b, term.scale, term.transpose, None, None, 0)
                plain = replace(plain, out_start=term.out_start)
                product, slack = self._product(plain, first, rows)
                total = base + change + product
                axis = 0 if term.transpose else 1
                magnitude = self._operand(term.magnitude).reshape(-1)
                if not term.transpose:
                    magnitude = magnitude[first + term.out_start :][:rows]
                norm = np.sqrt(np.square(total, dtype=np.float64).sum(axis=axis))
                factor = (magnitude / norm).astype(np.float32)
                wide = factor[None, :] if term.transpose else factor[:, None]
                left, right = slack
                scaled = (left, right * factor) if term.transpose else (left * factor, right)
                return total * wide - base, [scaled]
            case Rows():
                picked = np.array(term.indices, np.int64) - first
                here = (picked >= 0) & (picked < rows)
                values = self._operand(term.values)[here].reshape(-1, base.shape[1])
                change[picked[here]] = values - base[picked[here]]
                return change, []
            case Add():
                value = self._operand(term.value).reshape(-1, base.shape[1])[first : first + rows]
                change += value * np.float32(term.scale)
                ones = np.ones(base.shape[1], np.float32)
                return change, [(np.abs(value[:, 0] * np.float32(term.scale)), ones)]

    def _product(self, term: LowRank, first: int, rows: int) -> tuple[Array, tuple[Array, Array]]:
        """`scale * B A` of these rows; norms of the factors, whose product bounds its terms."""
        a = self._operand(term.a)[_slice(term.a_rows)]
        b = self._operand(term.b)[:, _slice(term.b_columns)]
        low = first + term.out_start
        left, right = (
            (a[:, low : low + rows].T, b.T) if term.transpose else (b[low : low + rows], a)
        )
        product = (left @ right) * np.float32(term.scale)
        size = abs(np.float32(term.scale))
        return product, (np.linalg.norm(left, axis=1) * size, np.linalg.norm(right, axis=0))

    def _operand(self, name: str) -> Array:
        if name not in self._operands:
            source, _, key = name.partition(":")
            info = self.sources[source].tensors[key]
            with Reader(self.sources[source].extents(key)) as reader:
                raw: NDArray[np.uint8] = np.empty(reader.nbytes, np.uint8)
                reader.into(raw, 0)
            self._operands[name] = widened(raw, info.dtype).reshape(tuple(info.shape))
        return self._operands[name]


class _Base:
    """Read the base's values of an operation by rows; a context manager."""

    def __init__(self, op: Op, sources: Sources) -> None:
        self._op = op
        self._columns = matrix_shape(op.shape)[1]
        self._whole: Array | None = None
        source = sources[op.input]
        if op.quantization is not None and STORED in op.quantization:
            from tasks.weights.quantized.decode import decoded_values

            values = decoded_values(op.quantization[STORED], source.extents(op.key)).reshape(-1)
            self._whole = values[op.start : op.start + prod(op.shape)].reshape(-1, self._columns)
            self._reader = Reader([])
            return
        item = ITEM_BITS[op.source_dtype] // 8
        extents = part(source.extents(op.key), op.start * item, prod(op.shape) * item)
        self._reader = Reader(extents)
        if op.transpose:
            raw: NDArray[np.uint8] = np.empty(self._reader.nbytes, np.uint8)
            self._reader.into(raw, 0)
            *stack, rows, columns = op.shape
            turned = widened(raw, op.source_dtype).reshape(*stack, columns, rows)
            self._whole = np.ascontiguousarray(turned.swapaxes(-1, -2)).reshape(-1, columns)

    def __enter__(self) -> _Base:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.__exit__()

    def rows(self, first: int, end: int) -> Array:
        """Rows `[first, end)` in fp32."""
        if self._whole is not None:
            return self._whole[first:end]
        item = ITEM_BITS[self._op.source_dtype] // 8
        raw: NDArray[np.uint8] = np.empty((end - first) * self._columns * item, np.uint8)
        self._reader.into(raw, first * self._columns * item)
        return widened(raw, self._op.source_dtype)


def of_expert(op: Op, index: int, rows_of_a: Mapping[str, int]) -> Op:
    """Return the operation of one matrix of a stack of shape (experts, rows, columns).

    Args:
        op: operation of the stack.
        index: index of the matrix.
        rows_of_a: first axis of every lora_A that its terms name.
    """
    size = prod(op.shape[1:])
    terms = tuple(
        term.of_expert(index, rows_of_a[term.a]) if isinstance(term, LowRank) else term
        for term in op.terms
    )
    return replace(op, shape=op.shape[1:], start=op.start + index * size, terms=terms)


def comparable(op: Op, sources: Sources) -> str:
    """Return the reason why a tensor cannot be computed here; "" if it can."""
    if op.encoding is not None:
        return f"stored as {op.encoding.scheme}"
    stored = op.quantization is not None and STORED in op.quantization
    if not stored and op.source_dtype not in NUMPY:
        return f"the base holds it in {op.source_dtype}"
    for term in op.terms:
        for name in operands(term):
            source, _, key = name.partition(":")
            if sources[source].tensors[key].dtype not in NUMPY:
                return f"{key} is {sources[source].tensors[key].dtype}"
    return ""


def widened(raw: NDArray[np.uint8], dtype: str) -> Array:
    """Convert bytes of a float dtype to fp32 values, 1-D."""
    if dtype == "F32":
        return raw.view(np.float32)
    return cast(raw, dtype, "F32").view(np.float32)


def rounded(values: Array, dtype: str) -> Array:
    """Round values to a dtype; returns fp32."""
    if dtype == "F32":
        return values
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    return widened(cast(flat, "F32", dtype), dtype).reshape(values.shape)


def ulp(values: NDArray[Any], dtype: str) -> NDArray[np.float64]:
    """Return the distance between neighbouring numbers of a dtype at these magnitudes."""
    _, exponent = np.frexp(values.astype(np.float64))
    step: NDArray[np.float64] = np.ldexp(
        1.0, np.maximum(exponent - 1 - MANTISSA[dtype], _LEAST[dtype])
    )
    return step


def _slice(stride: Stride | None) -> slice:
    return slice(None) if stride is None else slice(*stride)
