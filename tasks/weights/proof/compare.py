"""Compare one tensor of a merged model with its expected value, within rounding error.

A merge rounds: the product of the factors, the sum, sometimes the base before it. Every element may
be off by one unit in the last place (ulp) of the coarsest dtype involved, and by the bound of the
product's own rounding. Elements beyond that bound are wrong. Errors within it have no direction, so
the factor by which the change was added is 1 up to their noise: a scale that is wrong by a percent
moves no element beyond the bound and moves that factor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.files.dtype_conversion import MANTISSA, NUMPY, rounded, ulp, widened
from tasks.weights.files.file_ranges import Reader, part
from tasks.weights.files.header import ITEM_BITS
from tasks.weights.files.source import Source, info_of
from tasks.weights.plan.adapter_ops import operands
from tasks.weights.plan.operations import Op
from tasks.weights.proof.expected import (
    Array,
    Block,
    Expected,
    Sources,
)
from tasks.weights.quantized.packed import STORED

FLOOR = 2.0**-24
"""Absolute error of the smallest numbers in an fp16 merge."""
SCALE_MARGIN, _DORA_MARGIN = 0.005, 0.05
"""Tolerance of the factor around 1, on top of rounding noise. DoRA's norms are rounded as well, for
whole rows at once."""
SIGMAS = 6.0
_DORA_ULPS, _NARROWED_ULPS = 4.0, 2.0


@dataclass(frozen=True)
class Unit:
    """A tensor of the merged model, or one matrix of a stack, and the operation that defines it.

    Attributes:
        name: its name in reports.
        op: the operation of the plan that should have made it.
        key: key of the tensor in the merged model.
        start: first element within that tensor.
        group: the same for all experts of one layer and kind; "" if it is no expert.
        note: a difference that is not wrong: rows that were added.
    """

    name: str
    op: Op
    key: str
    start: int = 0
    group: str = ""
    note: str = ""


@dataclass
class Sums:
    """Counts and sums of one pass over a tensor.

    Attributes:
        elements: number of elements.
        changed: elements that the adapter changes, after rounding.
        differing: elements that differ from the rounded expected value.
        beyond: elements further from it than rounding explains.
        same: True if every element equals the base's, rounded.
        energy: squared norm of the change after rounding to nearest.
        error: inner product of the difference from it with that change.
        spread: sum of the squared products of both.
        update: squared norm of the exact change D.
        kept: `<Q - W, D>` of the base W and the merged values Q.
        scatter: sum of the squared products of D and the rounding errors `Q - W - D`.
    """

    elements: int = 0
    changed: int = 0
    differing: int = 0
    beyond: int = 0
    same: bool = True
    energy: float = 0.0
    error: float = 0.0
    spread: float = 0.0
    update: float = 0.0
    kept: float = 0.0
    scatter: float = 0.0

    @property
    def kept_share(self) -> float:
        """Share of the exact change that the merged values keep; 1 without a change."""
        return self.kept / self.update if self.update else 1.0

    @property
    def factor(self) -> float:
        """Estimated factor by which the change was added; 1 if the merge is right."""
        return 1.0 + self.error / self.energy if self.energy else 1.0

    @property
    def noise(self) -> float:
        """Standard deviation of `factor` from rounding alone."""
        return sqrt(self.spread) / self.energy if self.energy else 0.0

    @property
    def closest(self) -> tuple[float, float]:
        """Factor and its noise under the rounding that explains more: to nearest, or unbiased."""
        scatter = sqrt(self.scatter) / self.update if self.update else 0.0
        pairs = (self.factor, self.noise), (self.kept_share, scatter)
        return min(pairs, key=lambda pair: abs(pair[0] - 1.0) - SIGMAS * pair[1])

    def is_right(self, *, dora: bool = False) -> bool:
        """Return True if rounding, to nearest or without bias, explains every difference."""
        factor, noise = self.closest
        margin = (_DORA_MARGIN if dora else SCALE_MARGIN) + SIGMAS * noise
        return not self.beyond and abs(factor - 1.0) <= margin

    def __add__(self, other: Sums) -> Sums:
        counts = {
            item.name: getattr(self, item.name) + getattr(other, item.name)
            for item in fields(self)
            if item.name != "same"
        }
        return Sums(**counts, same=self.same and other.same)


@dataclass
class Merged:
    """Read the merged model's values of one unit by rows; a context manager."""

    unit: Unit
    source: Source
    _reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = self.source.tensors[self.unit.key].dtype
        self._item = ITEM_BITS[self.dtype] // 8
        self.shape = self.unit.op.shape
        self._columns = self.shape[-1] if len(self.shape) > 1 else 1
        count = prod(self.shape) * self._item
        extents = part(self.source.extents(self.unit.key), self.unit.start * self._item, count)
        self._reader = Reader(extents)

    def __enter__(self) -> Merged:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.__exit__()

    @cached_property
    def grid(self) -> str:
        """Dtype in which its values are exact: fp32 files often hold a model merged in bf16."""
        if self.dtype != "F32":
            return self.dtype
        sample = self._reader.read(0, min(self._reader.nbytes, 1 << 16))
        return "F32" if np.any(sample.view(np.uint32) & 0xFFFF) else "BF16"

    def raw(self, first: int, end: int) -> NDArray[np.uint8]:
        """Bytes of rows `[first, end)`."""
        row = self._columns * self._item
        return self._reader.read(first * row, (end - first) * row)

    def rows(self, first: int, end: int) -> Array:
        """Rows `[first, end)` in fp32."""
        return widened(self.raw(first, end), self.dtype).reshape(-1, self._columns)


def comparable(op: Op, sources: Sources) -> str:
    """Return the reason why a tensor cannot be computed here; "" if it can."""
    if op.encoding is not None:
        return f"stored as {op.encoding.scheme}"
    stored = op.quantization is not None and STORED in op.quantization
    if not stored and op.source_dtype not in NUMPY:
        return f"the base holds it in {op.source_dtype}"
    for name in (name for term in op.terms for name in operands(term)):
        dtype = info_of(name, sources).dtype
        if dtype not in NUMPY:
            return f"{name.partition(':')[2]} is {dtype}"
    return ""


def compare(unit: Unit, sources: Sources, merged: Source) -> Sums:
    """Compare one tensor with its expected value in one pass, a few MB at a time.

    Args:
        unit: the tensor and the operation that defines it.
        sources: inputs of the plan by name.
        merged: the merged model.

    Raises:
        ArtifactError: a file cannot be read.
    """
    expected, sums = Expected(unit.op, sources), Sums()
    with Merged(unit, merged) as values:
        coarse = coarsest(expected, values.grid)
        narrowed = MANTISSA[values.grid] < MANTISSA[expected.source_dtype]
        for block in expected.blocks():
            _add(sums, expected, block, values, coarse, narrowed)
    return sums


def coarsest(expected: Expected, grid: str) -> str:
    """Return the dtype with the fewest bits that a merge of this tensor rounds to."""
    return min((expected.source_dtype, grid), key=lambda dtype: MANTISSA[dtype])


def _add(
    sums: Sums, expected: Expected, block: Block, values: Merged, coarse: str, narrowed: bool
) -> None:
    rows, columns = block.base.shape
    merged = values.rows(block.first, block.first + rows)
    base = rounded(block.base, values.grid) if narrowed else block.base
    touched = bool(expected.op.terms)
    wanted = rounded(block.base + block.change, values.grid) if touched else base
    sums.elements += merged.size
    sums.same &= bool(np.array_equal(merged, base))
    at = np.flatnonzero(~(merged == wanted))
    sums.differing += len(at)
    if touched:
        change = wanted - base
        flat = change.reshape(-1)
        sums.energy += float(np.dot(flat, flat))
        sums.changed += int(np.count_nonzero(flat))
        exact = block.change.reshape(-1)
        gained = np.nan_to_num((merged - block.base).reshape(-1))
        sums.update += float(np.dot(exact, exact))
        sums.kept += float(np.dot(gained, exact))
        sums.scatter += float(np.square((gained - exact) * exact).sum())
    if not len(at):
        return
    error = merged.reshape(-1)[at].astype(np.float64) - wanted.reshape(-1)[at]
    bound = np.full(len(at), FLOOR)
    if touched or narrowed or values.grid != expected.source_dtype:
        ulps = _NARROWED_ULPS if narrowed else 1.0
        bound += tolerance(expected, block, coarse, (at // columns, at % columns), ulps=ulps)
    sums.beyond += int(np.count_nonzero(~(np.abs(error) <= bound)))
    if touched:
        both = np.nan_to_num(error * flat[at])
        sums.error += float(both.sum())
        sums.spread += float(np.square(both).sum())


def tolerance(
    expected: Expected, block: Block, coarse: str, at: tuple[NDArray[Any], NDArray[Any]],
    *, ulps: float = 1.0,
) -> NDArray[np.float64]:  # fmt: skip
    """Return the largest rounding error of some elements, in fp64.

    Args:
        expected: the tensor.
        block: the rows that contain the elements.
        coarse: dtype with the fewest bits that the merge rounds to (safetensors name).
        at: row indices within the block, and column indices.
        ulps: units in the last place that one rounding may be off.
    """
    base, change = block.base[at], block.change[at]
    size = np.maximum(np.abs(base), np.abs(base + change))
    ulps = max(ulps, _DORA_ULPS) if expected.is_dora else ulps
    return ulps * 1.001 * ulp(size, coarse) + expected.precision * block.bound(*at)
