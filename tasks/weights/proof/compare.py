"""Compare one tensor of a merged model with base plus change, within rounding error.

A merge rounds: the product of the factors, the sum, sometimes the base before it. Every element may
be off by one unit in the last place (ulp) of the coarsest dtype involved, and by the bound of the
product's own rounding. Elements beyond that bound are wrong. Errors within it have no direction, so
the factor by which the change was added is 1 up to their noise: a scale that is wrong by a percent
moves no element beyond the bound and moves that factor.

A tensor that is wrong so is compared again with what a usual mistake makes of it: the change added
with another factor, or to the base that was quantised to 4 bits and dequantised. Such values are
known less exactly, so a few elements may be off, but the mistake has to explain far more than a
right merge.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from tasks.weights.proof.expected import Array, Block, Expected, Sources
from tasks.weights.quantized.packed import LEVELS, STORED

_FLOOR = 2.0**-24
"""Absolute error of the smallest numbers in an fp16 merge."""
SCALE_MARGIN, _DORA_MARGIN = 0.005, 0.05
"""Tolerance of the factor around 1, on top of rounding noise. DoRA's norms are rounded as well, for
whole rows at once."""
SIGMAS = 6.0
_DORA_ULPS, _ROUNDED_TWICE_ULPS = 4.0, 2.0
_EXCEPT, _EXCEPT_FIRST, _BETTER = 0.005, 0.05, 0.5
"""Share of elements that a mistake may leave unexplained (values between two 4-bit levels), in all
and in one block more, and share of the squared difference that it may leave."""
_PACKED = 64
"""Elements that share a scale in bitsandbytes' 4 bits."""
_PACKED_SCALE_ERROR = 0.08
"""Largest relative error of such a scale in 8 bits."""


@dataclass(frozen=True)
class Unit:
    """A tensor of the merged model, or one matrix of a stack, and the operation that defines it.

    Attributes:
        name: its name in reports.
        op: the operation of the plan that should have made it.
        key: key of the tensor in the merged model.
        start: first element within that tensor.
        note: a difference that is not wrong: rows that were added.
    """

    name: str
    op: Op
    key: str
    start: int = 0
    note: str = ""

    @property
    def may_be_packed(self) -> bool:
        """True if its base may have been quantised: blocks of 64 end where blocks of rows do."""
        rows, columns = self.op.shape if len(self.op.shape) == 2 else (1, 1)
        whole = rows * columns % _PACKED == 0 and columns * 16 % _PACKED == 0
        return min(rows, columns) > 1 and whole


@dataclass
class Sums:
    """Counts and sums of one pass: base W, exact change D, wanted values, merged values Q.

    Attributes:
        elements: number of elements.
        beyond: elements further from the wanted value than rounding explains.
        same: True if every element equals the base's, rounded.
        energy: squared norm of the change after rounding to nearest.
        error: inner product of the difference from it with that change.
        spread: sum of the squared products of both.
        update: squared norm of D.
        kept: `<Q - W, D>`.
        scatter: sum of the squared products of D and of what Q gained more, or less, than wanted.
        rest: squared difference of Q and the wanted values.
        plain: squared difference of Q and those of a right merge.
    """

    elements: int = 0
    beyond: int = 0
    same: bool = True
    energy: float = 0.0
    error: float = 0.0
    spread: float = 0.0
    update: float = 0.0
    kept: float = 0.0
    scatter: float = 0.0
    rest: float = 0.0
    plain: float = 0.0

    @property
    def kept_share(self) -> float:
        """Share of the exact change that the merged values keep; 1 without a change."""
        return self.kept / self.update if self.update else 1.0

    def _left(self, scale: float = 1.0) -> Sequence[tuple[float, float]]:
        """Return what is left of the change and its noise, to nearest and without bias."""
        if not self.update:
            return [(0.0, 0.0)]
        left = self.kept_share - scale, sqrt(self.scatter) / self.update
        if not self.energy:
            return [left]
        return [(self.error / self.energy, sqrt(self.spread) / self.energy), left]

    @property
    def closest(self) -> tuple[float, float]:
        """Factor on the change and its noise under the rounding that explains more."""
        left, noise = min(self._left(), key=lambda pair: abs(pair[0]) - SIGMAS * pair[1])
        return 1.0 + left, noise

    def is_right(self, *, dora: bool = False) -> bool:
        """Return True if rounding, to nearest or without bias, explains every difference."""
        factor, noise = self.closest
        margin = (_DORA_MARGIN if dora else SCALE_MARGIN) + SIGMAS * noise
        return not self.beyond and abs(factor - 1.0) <= margin

    def explain(self, scale: float) -> bool:
        """Return True if a mistake explains the tensor, and nothing of the change is left."""
        few = self.beyond <= _EXCEPT * self.elements and self.rest <= _BETTER * self.plain
        return few and any(
            abs(left) <= SCALE_MARGIN + SIGMAS * noise for left, noise in self._left(scale)
        )

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


def compare(
    unit: Unit,
    sources: Sources,
    merged: Source,
    *,
    scale: float = 1.0,
    packed: bool = False,
) -> Sums:
    """Compare one tensor in one pass, a few MB at a time.

    Args:
        unit: the tensor and the operation that defines it.
        sources: inputs of the plan by name.
        merged: the merged model.
        scale: factor on the change; the pass ends early if another one than 1 explains little.
        packed: the base was quantised to 4 bits and dequantised; ends early, too.

    Raises:
        ArtifactError: a file cannot be read.
    """
    expected, sums = Expected(unit.op, sources), Sums()
    with Merged(unit, merged) as values:
        comparison = _Pass(expected, values.grid, scale, packed)
        turned = bool((unit.op.quantization or {}).get("turned"))
        for block in expected.blocks(whole=packed and turned):
            block_sums = comparison.add(
                block, values.rows(block.first, block.first + len(block.base))
            )
            sums = sums + block_sums
            few = _EXCEPT * expected.rows * expected.columns
            if not comparison.exact and sums.beyond > few + _EXCEPT_FIRST * block_sums.elements:
                break
    return sums


@dataclass(frozen=True)
class _Pass:
    """One comparison of a tensor.

    Attributes:
        expected: the tensor.
        grid: dtype in which the merged values are exact.
        scale: factor on the change.
        packed: the base went through 4 bits.
    """

    expected: Expected
    grid: str
    scale: float
    packed: bool

    @property
    def exact(self) -> bool:
        """True if a right merge is compared and not a mistake."""
        return self.scale == 1.0 and not self.packed

    @property
    def _coarse(self) -> str:
        return min((self.expected.source_dtype, self.grid), key=lambda dtype: MANTISSA[dtype])

    @property
    def _narrowed(self) -> bool:
        return MANTISSA[self.grid] < MANTISSA[self.expected.source_dtype]

    def add(self, block: Block, merged: Array) -> Sums:
        """Return the sums of one block."""
        touched, columns = bool(self.expected.op.terms), block.base.shape[1]
        change = block.change if self.scale == 1.0 else np.float32(self.scale) * block.change
        base = block.base
        if self.packed:
            base = rounded(self._through_4_bits(base, merged - change), self._coarse)
        near = rounded(base, self.grid) if self._narrowed else base
        nearest = rounded(base + change, self.grid) if touched else near
        wanted = nearest if self.exact or not touched else base + change
        sums = Sums(merged.size, same=bool(np.array_equal(merged, near)))
        if touched:
            exact = block.change.reshape(-1)
            gained = np.nan_to_num((merged - base).reshape(-1))
            sums.update = float(np.dot(exact, exact))
            sums.kept = float(np.dot(gained, exact))
            sums.scatter = float(np.square((gained - change.reshape(-1)) * exact).sum())
            moved, error = (nearest - near).reshape(-1), np.nan_to_num(merged - nearest).reshape(-1)
            sums.energy = float(np.dot(moved, moved))
            sums.error = float(np.dot(error, moved))
            sums.spread = float(np.square(error * moved).sum())
        if not self.exact:
            right = block.base + block.change
            sums.plain = float(np.square(merged - right, dtype=np.float64).sum())
            sums.rest = float(np.square(merged - wanted, dtype=np.float64).sum())
        at = np.flatnonzero(~(merged == wanted))
        if not len(at):
            return sums
        error = merged.reshape(-1)[at].astype(np.float64) - wanted.reshape(-1)[at]
        bound = self._bound(block, base, base + change, (at // columns, at % columns))
        sums.beyond = int(np.count_nonzero(~(np.abs(error) <= bound)))
        return sums

    def _bound(
        self, block: Block, base: Array, value: Array, at: tuple[NDArray[Any], NDArray[Any]]
    ) -> NDArray[np.float64]:
        """Return the largest rounding error of some elements, in fp64."""
        expected, ulps = self.expected, 1.0
        is_copy = self.exact and not expected.op.terms and self.grid == expected.source_dtype
        if is_copy:
            return np.full(len(at[0]), _FLOOR)
        if self._narrowed or not self.exact:
            ulps = _ROUNDED_TWICE_ULPS
        if expected.is_dora:
            ulps = max(ulps, _DORA_ULPS)
        size = np.maximum(np.abs(base[at]), np.abs(value[at]))
        return (
            _FLOOR + ulps * 1.001 * ulp(size, self._coarse) + expected.precision * block.bound(*at)
        )

    def _through_4_bits(self, base: Array, rest: Array) -> Array:
        """Return the base quantised to 4 bits and dequantised.

        The scale of each 4-bit block is fitted to `rest`, the merged values without the change:
        double quantisation rounds it to 8 bits.
        """
        how = self.expected.op.quantization or {}
        levels = np.array(sorted(LEVELS[how.get("type", "nf4")]), np.float32)
        turned = bool(how.get("turned"))
        base, rest = (base.T, rest.T) if turned else (base, rest)
        shape = base.shape
        base, rest = base.reshape(-1, _PACKED), rest.reshape(-1, _PACKED)
        peak = np.abs(base).max(axis=1, keepdims=True)
        middles = (levels[1:] + levels[:-1]) / 2
        picked = levels[np.searchsorted(middles, base / np.where(peak, peak, 1))]
        size = np.square(picked).sum(axis=1, keepdims=True)
        fitted = (rest * picked).sum(axis=1, keepdims=True) / np.where(size, size, 1)
        most = _PACKED_SCALE_ERROR
        fitted = np.clip(fitted, peak * (1 - most), peak * (1 + most))
        value = (picked * fitted).reshape(shape)
        return value.T if turned else value
