"""Compute the expected tensors of a merge, block by block, in fp32 with numpy alone.

Independent of `tasks/weights/execute`, which merges: a proof must not share its arithmetic with the
code that it checks. `recheck.py` reads base and factors through this file, but computes in fp64.
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
"""Exponent of the smallest positive number by dtype."""
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
        self.op, self.sources = op, sources
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
        """Yield all rows in order, a few at a time; all at once for norms of columns (DoRA)."""
        whole |= any(isinstance(term, Dora) and term.transpose for term in self.op.terms)
        cuts = [(0, self.rows)] if whole else row_blocks(self.rows, self.columns)
        with BaseRows(self.op, self.sources) as base:
            for first, end in cuts:
                yield self._block(base, first, end)

    def block(self, first: int, end: int) -> Block:
        """Return rows `[first, end)`; must be all rows if a term takes norms of columns."""
        with BaseRows(self.op, self.sources) as base:
            return self._block(base, first, end)

    def _block(self, base: BaseRows, first: int, end: int) -> Block:
        values = base.rows(first, end)
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
                plain = LowRank(
                    term.a, term.b, term.scale, term.transpose, out_start=term.out_start
                )
                product, slack = self._product(plain, first, rows)
                total = base + change + product
                axis = 0 if term.transpose else 1
                magnitude = self._operand(term.magnitude).reshape(-1)
                if not term.transpose:
                    magnitude = magnitude[first + term.out_start :][:rows]
                norm = np.sqrt(np.square(total, dtype=np.float64).sum(axis=axis))
                factor = (magnitude / norm).astype(np.float32)
                by_element = factor[None, :] if term.transpose else factor[:, None]
                left, right = slack
                scaled = (left, right * factor) if term.transpose else (left * factor, right)
                return total * by_element - base, [scaled]
            case Rows():
                picked = np.array(term.indices, np.int64) - first
                inside = (picked >= 0) & (picked < rows)
                values = self._operand(term.values)[inside].reshape(-1, base.shape[1])
                change[picked[inside]] = values - base[picked[inside]]
                return change, []
            case Add():
                value = self._operand(term.value).reshape(-1, base.shape[1])[first : first + rows]
                change += value * np.float32(term.scale)
                ones = np.ones(base.shape[1], np.float32)
                return change, [(np.abs(value[:, 0] * np.float32(term.scale)), ones)]

    def _product(self, term: LowRank, first: int, rows: int) -> tuple[Array, tuple[Array, Array]]:
        """Return `scale * B A` of these rows, and norms of the factors, which bound its terms."""
        a, b = self._operand(term.a), self._operand(term.b)
        left, right = factors(term, a, b, first + term.out_start, rows)
        product = (left @ right) * np.float32(term.scale)
        size = abs(np.float32(term.scale))
        return product, (np.linalg.norm(left, axis=1) * size, np.linalg.norm(right, axis=0))

    def _operand(self, name: str) -> Array:
        if name not in self._operands:
            self._operands[name] = read_operand(name, self.sources)
        return self._operands[name]


def read_operand(name: str, sources: Sources) -> Array:
    """Read a full adapter tensor in fp32, by its name in the plan ("input:key")."""
    source, _, key = name.partition(":")
    info = sources[source].tensors[key]
    with Reader(sources[source].extents(key)) as reader:
        raw: NDArray[np.uint8] = np.empty(reader.nbytes, np.uint8)
        reader.into(raw, 0)
    return widened(raw, info.dtype).reshape(tuple(info.shape))


def factors(
    term: LowRank, a: NDArray[Any], b: NDArray[Any], first: int, count: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the factors of some rows of `B A`: shapes (count, rank) and (rank, columns).

    `a` is lora_A, shape (rank, in), and `b` lora_B, shape (out, rank), of one matrix.
    """
    a, b = a[_slice(term.a_rows)], b[:, _slice(term.b_columns)]
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
        if op.quantization is not None and STORED in op.quantization:
            from tasks.weights.quantized.decode import decoded_values

            values = decoded_values(op.quantization[STORED], source.extents(op.key)).reshape(-1)
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
        raw: NDArray[np.uint8] = np.empty(nbytes, np.uint8)
        self._reader.into(raw, at)
        return widened(raw, self._dtype)


def _turned(op: Op, values: Array) -> Array:
    """Return 1-D values as rows of the output; the source may be stored transposed."""
    if op.transpose:
        *stack, rows, columns = op.shape
        values = np.ascontiguousarray(values.reshape(*stack, columns, rows).swapaxes(-1, -2))
    return values.reshape(-1, matrix_shape(op.shape)[1])


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
