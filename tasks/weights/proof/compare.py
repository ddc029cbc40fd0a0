"""One tensor of a merged model against what it has to be, with tolerances from rounding alone.

A merge rounds: the product of the factors, the sum, sometimes the base before it. Every element may
be off by one unit in the last place (ulp) of the coarsest dtype involved, and by the bound of the
product's own rounding. Elements beyond that bound are wrong. Errors within it have no direction, so
the factor by which the change was added is 1 up to their noise: a scale that is wrong by a percent
moves no element beyond the bound and moves that factor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.extents import Reader, part
from tasks.weights.header import ITEM_BITS
from tasks.weights.plan import Op
from tasks.weights.proof.expected import (
    MANTISSA,
    Array,
    Block,
    Expected,
    Sources,
    rounded,
    ulp,
    widened,
)
from tasks.weights.source import Source

FLOOR = 2.0**-24
"""What a merge in fp16 makes of the smallest numbers."""
SCALE_MARGIN, _DORA_MARGIN = 0.005, 0.05
"""How far the factor may be from 1, beside the noise of rounding. DoRA's norms are rounded too, by
whole rows."""
SIGMAS = 6.0
_DORA_ULPS, _NARROWED_ULPS = 4.0, 2.0


@dataclass(frozen=True)
class Unit:
    """A tensor of the merged model, or one matrix of a stack, and what it has to be.

    Attributes:
        name: what reports call it.
        op: how it has to come to be.
        key: in the merged model.
        start: element of that tensor at which it begins.
        group: the same for all experts of one layer and kind; "" for what is no expert.
        note: what differs without being wrong: rows that were added.
    """

    name: str
    op: Op
    key: str
    start: int = 0
    group: str = ""
    note: str = ""


@dataclass
class Sums:
    """What one pass over a tensor counts.

    Attributes:
        elements: all of them.
        changed: those that the adapter changes, once rounded.
        differing: those that are not the expected number, rounded.
        beyond: those further from it than rounding explains.
        same: every element is the base's, rounded.
        energy: squared norm of the expected change.
        error: inner product of the difference with the expected change.
        spread: sum of the squared products of both.
    """

    elements: int = 0
    changed: int = 0
    differing: int = 0
    beyond: int = 0
    same: bool = True
    energy: float = 0.0
    error: float = 0.0
    spread: float = 0.0

    @property
    def factor(self) -> float:
        """The factor by which the change was added, as far as this pass tells: 1 where right."""
        return 1.0 + self.error / self.energy if self.energy else 1.0

    @property
    def noise(self) -> float:
        """Standard deviation of `factor` from rounding alone."""
        return sqrt(self.spread) / self.energy if self.energy else 0.0

    def is_right(self, *, dora: bool = False) -> bool:
        """Return True if rounding explains every difference."""
        margin = (_DORA_MARGIN if dora else SCALE_MARGIN) + SIGMAS * self.noise
        return not self.beyond and abs(self.factor - 1.0) <= margin

    def __add__(self, other: Sums) -> Sums:
        counts = {
            name: getattr(self, name) + getattr(other, name)
            for name in ("elements", "changed", "differing", "beyond", "energy", "error", "spread")
        }
        return Sums(**counts, same=self.same and other.same)


@dataclass
class Merged:
    """The merged model's values of one unit, by rows; a context manager.

    Attributes:
        unit: the tensor.
        source: the merged model.
    """

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
        """Dtype that its values are exact in: fp32 files often hold what was merged in bf16."""
        if self.dtype != "F32":
            return self.dtype
        sample: NDArray[np.uint8] = np.empty(min(self._reader.nbytes, 1 << 16), np.uint8)
        self._reader.into(sample, 0)
        return "F32" if np.any(sample.view(np.uint32) & 0xFFFF) else "BF16"

    def raw(self, first: int, end: int) -> NDArray[np.uint8]:
        """Bytes of rows `[first, end)`."""
        row = self._columns * self._item
        raw: NDArray[np.uint8] = np.empty((end - first) * row, np.uint8)
        self._reader.into(raw, first * row)
        return raw

    def rows(self, first: int, end: int) -> Array:
        """Rows `[first, end)` in fp32."""
        return widened(self.raw(first, end), self.dtype).reshape(-1, self._columns)


def compare(unit: Unit, sources: Sources, merged: Source) -> Sums:
    """Hold one tensor against what it has to be: one pass over both, a few MB at a time.

    Raises:
        ArtifactError: a file that cannot be read.
    """
    expected, found = Expected(unit.op, sources), Sums()
    with Merged(unit, merged) as values:
        coarse = coarsest(expected, values.grid)
        narrowed = MANTISSA[values.grid] < MANTISSA[expected.source_dtype]
        for block in expected.blocks():
            _add(found, expected, block, values, coarse, narrowed)
    return found


def coarsest(expected: Expected, grid: str) -> str:
    """The dtype with the fewest bits, of those that a merge of this tensor rounds to."""
    return min((expected.source_dtype, grid), key=lambda one: MANTISSA[one])


def _add(
    found: Sums, expected: Expected, block: Block, values: Merged, coarse: str, narrowed: bool
) -> None:
    rows, columns = block.base.shape
    merged = values.rows(block.first, block.first + rows)
    base = rounded(block.base, values.grid) if narrowed else block.base
    touched = bool(expected.op.terms)
    wanted = rounded(block.base + block.change, values.grid) if touched else base
    found.elements += merged.size
    found.same &= bool(np.array_equal(merged, base))
    at = np.flatnonzero(~(merged == wanted))
    found.differing += len(at)
    if touched:
        change = wanted - base
        flat = change.reshape(-1)
        found.energy += float(np.dot(flat, flat))
        found.changed += int(np.count_nonzero(flat))
    if not len(at):
        return
    error = merged.reshape(-1)[at].astype(np.float64) - wanted.reshape(-1)[at]
    bound = np.full(len(at), FLOOR)
    if touched or narrowed or values.grid != expected.source_dtype:
        ulps = _NARROWED_ULPS if narrowed else 1.0
        bound += tolerance(expected, block, coarse, (at // columns, at % columns), ulps=ulps)
    found.beyond += int(np.count_nonzero(~(np.abs(error) <= bound)))
    if touched:
        both = np.nan_to_num(error * flat[at])
        found.error += float(both.sum())
        found.spread += float(np.square(both).sum())


def tolerance(
    expected: Expected, block: Block, coarse: str, at: tuple[NDArray[Any], NDArray[Any]],
    *, ulps: float = 1.0,
) -> NDArray[np.float64]:  # fmt: skip
    """How far some elements, given by rows and columns, may be off by rounding."""
    base, change = block.base[at], block.change[at]
    size = np.maximum(np.abs(base), np.abs(base + change))
    ulps = max(ulps, _DORA_ULPS) if expected.is_dora else ulps
    return ulps * 1.001 * ulp(size, coarse) + expected.precision * block.bound(*at)
