"""Recompute sampled rows of a merge: the written tensors are `base + scale * B A`, rounded once.

Model outputs cannot show a small fault: after five steps an adapter hardly changes a
log-probability, and a module that was left out changes none. So rows of every written tensor are
read back and recomputed from base and adapter in fp64, without the code that merges
(`lora_merge.py`, `kernels.py`). A merge adds in fp32 and rounds once. An element is right if it is
the rounding of a number within fp32's error of the exact one. So a correct merge has no wrong
element; a module left out, a scale off by 2 % or another base has, unless it rounds to the same
bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tasks.core.contract import Check
from tasks.weights.execute.compute import matrix_shape
from tasks.weights.execute.copying import opened
from tasks.weights.execute.journal import Measured
from tasks.weights.files.dtype_conversion import NUMPY, cast
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.header import ITEM_BITS
from tasks.weights.files.reader import DTYPE_NAMES, torch_dtype
from tasks.weights.files.source import Source
from tasks.weights.plan.adapter_ops import Add, Dora, LowRank, Rows, Term, operands
from tasks.weights.plan.operations import Op, Plan
from tasks.weights.proof.expected import BaseRows, factors, read_operand
from tasks.weights.quantized.packed import STORED

if TYPE_CHECKING:
    import torch

Array: TypeAlias = NDArray[np.float64]

PIECES, PIECE_ROWS = 8, 8
"""Sampled rows of a tensor: number of evenly spaced pieces, and rows per piece."""
_HINT = "merge again: force=[merge]; if it fails again, suspect the disk or the memory"
_UNIT = 2.0**-24
"""Largest relative error of one rounding in fp32."""


@dataclass(frozen=True)
class Recomputed:
    """Result of the recomputation of one tensor.

    Attributes:
        name: its key.
        elements: number of recomputed elements.
        wrong: elements that differ from base plus adapter by more than rounding.
        skipped: reason why it was not recomputed; "" if it was.
    """

    name: str
    elements: int = 0
    wrong: int = 0
    skipped: str = ""


def recompute(plan: Plan, sources: Mapping[str, Source], merged: Source) -> list[Recomputed]:
    """Recompute sampled rows of every tensor of a merge.

    Args:
        plan: plan of the merge.
        sources: inputs of the plan by name.
        merged: the written model.

    Raises:
        ArtifactError: a file cannot be read.
    """
    return [_recomputed(op, sources, merged) for op in plan.ops]


def recomputed_check(results: list[Recomputed]) -> Check:
    """Return one check for all tensors; it names the first that are wrong."""
    wrong = [f"{r.name} ({r.wrong} of {r.elements})" for r in results if r.wrong]
    skipped = [result for result in results if result.skipped]
    text = f"{sum(r.elements for r in results)} elements of {len(results)} tensors are"
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        text = f"{len(wrong)} of {len(results)} tensors are not: {', '.join(wrong[:3])}{more}"
    if skipped:
        text += f"; {len(skipped)} not recomputed: {skipped[0].name} is {skipped[0].skipped}"
    expected = "base + scale * B A, rounded once"
    return Check("sampled rows", expected, text, ok=not wrong, hint=_HINT)


def as_json(results: list[Recomputed]) -> list[dict[str, Any]]:
    """Return plain JSON; `Recomputed(**entry)` reads an entry."""
    return [asdict(result) for result in results]


def _recomputed(op: Op, sources: Mapping[str, Source], merged: Source) -> Recomputed:
    named = [name.partition(":") for term in op.terms for name in operands(term)]
    dtypes = {op.dtype, *(sources[source].tensors[key].dtype for source, _, key in named)}
    stored = op.quantization is not None and STORED in op.quantization
    dtypes |= set() if stored else {op.source_dtype}
    if op.encoding is not None or not dtypes <= set(NUMPY):
        return Recomputed(op.name, skipped=op.encoding.scheme if op.encoding else min(dtypes))
    rows, columns = matrix_shape(op.shape)
    exact, elements, wrong = _Exact(op, sources), 0, 0
    with exact.base, Reader(merged.extents(op.name)) as reader:
        for first, end in _pieces(op, rows):
            written = _values(reader, op.dtype, first * columns, (end - first) * columns)
            values, slack = exact.rows(first, end)
            low, high = (_rounded(values + sign * slack, op.dtype).ravel() for sign in (-1, 1))
            wrong += int(np.count_nonzero(~((low <= written) & (written <= high))))
            elements += written.size
    return Recomputed(op.name, elements, wrong)


def _pieces(op: Op, rows: int) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of the sampled rows: all rows of a small tensor, some of each expert."""
    stack = prod(op.shape[:-2]) if len(op.shape) > 2 else 1
    count, whole = max(PIECES, stack), any(isinstance(t, Dora) and t.transpose for t in op.terms)
    if whole or rows <= count * PIECE_ROWS:
        yield 0, rows
        return
    for number in range(count):
        first = number * (rows - PIECE_ROWS) // (count - 1)
        yield first, first + PIECE_ROWS


class _Exact:
    """Exact rows of one output tensor in fp64, with the error bound of an fp32 merge."""

    def __init__(self, op: Op, sources: Mapping[str, Source]) -> None:
        self.op, self.sources = op, sources
        self.columns = matrix_shape(op.shape)[1]
        self.base: BaseRows | _BaseAsTrained = (
            _BaseAsTrained(op, sources) if _is_dequantized(op) else BaseRows(op, sources)
        )
        self._operands: dict[str, Array] = {}

    def rows(self, first: int, end: int) -> tuple[Array, Array]:
        """Return values and error bounds of rows `[first, end)`, each (rows, columns)."""
        values = self.base.rows(first, end).astype(np.float64)
        slack = 2 * _UNIT * np.abs(values)
        for term in self.op.terms:
            values, slack = self._after(term, values, slack, first)
        return values, slack + (2 * _UNIT * np.abs(values) if self.op.terms else 0)

    def _after(self, term: Term, values: Array, slack: Array, first: int) -> tuple[Array, Array]:
        here = slice(first, first + len(values))
        match term:
            case LowRank():
                change, error = self._product(term, here)
                return values + change, slack + error
            case Dora():
                plain = LowRank(
                    term.a, term.b, term.scale, term.transpose, out_start=term.out_start
                )
                change, error = self._product(plain, here)
                total, axis = values + change, 0 if term.transpose else 1
                magnitude = self._operand(term.magnitude).reshape(-1)
                if not term.transpose:
                    magnitude = magnitude[first + term.out_start :][: len(values)]
                factor = np.expand_dims(magnitude / np.linalg.norm(total, axis=axis), axis)
                # Norms in fp32 sum squares in any order.
                spread = (8 + np.sqrt(total.shape[axis])) * _UNIT * np.abs(total * factor)
                return total * factor, (slack + error) * np.abs(factor) + spread
            case Rows():
                picked = np.array(term.indices) - first
                inside = (picked >= 0) & (picked < len(values))
                values[picked[inside]] = self._operand(term.values)[inside]
                return values, slack
            case Add():
                added = self._operand(term.value).reshape(-1, self.columns)[here] * term.scale
                return values + added, slack + 2 * _UNIT * np.abs(added)

    def _product(self, term: LowRank, here: slice) -> tuple[Array, Array]:
        """Return `scale * B A` of some rows, and the bound of its fp32 error."""
        a, b = self._operand(term.a), self._operand(term.b)
        height = a.shape[1] if term.transpose else b.shape[0]
        change, size, row, rank = [], [], here.start, len(a)
        while row < here.stop:
            expert, low = divmod(row, height) if term.experts > 1 else (0, row + term.out_start)
            count = min(height - low, here.stop - row)
            part = term.of_expert(expert, len(a)) if term.experts > 1 else term
            left, right = factors(part, a, b, low, count)
            left = left * term.scale
            change.append(left @ right)
            size.append(np.abs(left) @ np.abs(right))
            row, rank = row + count, right.shape[0]
        return np.concatenate(change), (rank + 2) * _UNIT * np.concatenate(size)

    def _operand(self, name: str) -> Array:
        if name not in self._operands:
            self._operands[name] = read_operand(name, self.sources).astype(np.float64)
        return self._operands[name]


def _is_dequantized(op: Op) -> bool:
    """Return True if the merge goes into the base as QLoRA training quantized it."""
    how = op.quantization
    return how is not None and STORED not in how and how["base"] == "dequantized"


class _BaseAsTrained:
    """Base that QLoRA training quantized and dequantized, by rows; needs torch."""

    def __init__(self, op: Op, sources: Mapping[str, Source]) -> None:
        import torch

        from tasks.weights.execute.full_tensors import full_tensor
        from tasks.weights.quantized.nf4 import RowsAsTrained

        how, columns = op.quantization, matrix_shape(op.shape)[1]
        assert how is not None
        self._slow: torch.Tensor | None = None
        if op.transpose or how.get("turned"):  # `RowsAsTrained` does not support these
            self._slow = full_tensor(op, sources, Measured()).reshape(-1, columns)
            return
        with opened(op, sources) as reader:
            raw: NDArray[np.uint8] = np.empty(reader.nbytes, np.uint8)
            reader.into(raw, 0)
        stored = torch.from_numpy(raw).view(torch_dtype(op.source_dtype)).reshape(-1, columns)
        loaded = stored.to(torch_dtype(DTYPE_NAMES[how["loaded_dtype"]]))
        self._quantized = RowsAsTrained(loaded, how)

    def __enter__(self) -> _BaseAsTrained:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def rows(self, first: int, end: int) -> NDArray[np.float32]:
        """Return rows `[first, end)` in fp32, shape (end - first, columns)."""
        slow = self._slow
        rows = slow[first:end] if slow is not None else self._quantized.rows(first, end)
        values: NDArray[np.float32] = rows.float().numpy()
        return values


def _values(reader: Reader, dtype: str, first: int, count: int) -> Array:
    item = ITEM_BITS[dtype] // 8
    raw: NDArray[np.uint8] = np.empty(count * item, np.uint8)
    reader.into(raw, first * item)
    return cast(raw, dtype, "F32").view(np.float32).astype(np.float64)


def _rounded(values: Array, dtype: str) -> Array:
    """Round to fp32 and then to a dtype, as a merge does; monotone."""
    with np.errstate(over="ignore"):
        wide = values.astype(np.float32).reshape(-1).view(np.uint8)
    narrow = cast(cast(wide, "F32", dtype), dtype, "F32").view(np.float32)
    return narrow.astype(np.float64).reshape(values.shape)
