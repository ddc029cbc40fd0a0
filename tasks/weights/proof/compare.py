"""Compare one tensor of a merge, block by block, with base plus change within rounding error.

A merge of ours adds in fp32 and rounds once, in a way that is known: `wrong_rows` counts elements
that are not the rounding of a number within fp32's error of the exact sum.

Other tools round the product of the factors, the sum, sometimes the base before it. Every element
may be off by one unit in the last place (ulp) of the coarsest dtype involved, and by the bound of
the product's own rounding. Elements beyond that bound are wrong. Errors within it have no
direction, so the factor by which the change was added is 1 up to their noise: a scale that is wrong
by a percent moves no element beyond the bound and moves that factor.

A tensor that is wrong so is compared again with what a usual mistake makes of it: the change added
with another factor, or to the base that was quantised to 4 bits and dequantised. Such values are
known less exactly, so a few elements may be off, but the mistake has to explain far more than a
right merge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.execute.compute import full_tensor, matrix_shape
from tasks.weights.execute.copying import opened
from tasks.weights.execute.outcome import Measured
from tasks.weights.files.dtypes import (
    DTYPE_NAMES,
    ITEM_BITS,
    MANTISSA,
    rounded,
    torch_dtype,
    ulp,
    widened,
)
from tasks.weights.files.source import Reader, Source, part
from tasks.weights.plan import Op
from tasks.weights.proof.expected import Array, Block, Expected, Sources
from tasks.weights.proof.unbiased import random_parts, round_with, small
from tasks.weights.quantized.bnb4 import LEVELS
from tasks.weights.rounding import GRIDS

_FLOOR = 2.0**-24
"""Absolute error of the smallest numbers in an fp16 merge."""
_UNIT = 2.0**-24
"""Largest relative error of one rounding in fp32."""
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


@dataclass
class Sums:
    """Counts and sums of one pass: base W, exact change D, wanted values, merged values Q."""

    elements: int = 0
    beyond: int = 0  # elements further from the wanted value than rounding explains
    same: bool = True  # every element equals the base's, rounded
    energy: float = 0.0  # squared norm of the change after rounding to nearest
    error: float = 0.0  # inner product of the difference from it with that change
    spread: float = 0.0  # sum of the squared products of both
    update: float = 0.0  # squared norm of D
    kept: float = 0.0  # `<Q - W, D>`
    scatter: float = 0.0  # sum of the squared products of D and of what Q gained more than wanted
    rest: float = 0.0  # squared difference of Q and the wanted values
    plain: float = 0.0  # squared difference of Q and those of a right merge

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
    """Read a tensor of the merged model by rows, from element `start` on; a context manager."""

    source: Source
    key: str
    shape: tuple[int, ...]
    start: int = 0
    _reader: Reader = field(init=False)

    def __post_init__(self) -> None:
        self.dtype = self.source.tensors[self.key].dtype
        item = ITEM_BITS[self.dtype] // 8
        self._columns = matrix_shape(self.shape)[1]
        count = prod(self.shape) * item
        self._reader = Reader(part(self.source.extents(self.key), self.start * item, count))
        self._row = self._columns * item

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

    def raw(self) -> NDArray[np.uint8]:
        """Return all bytes."""
        return self._reader.read()

    def rows(self, block: Block) -> Array:
        """Return the rows of a block, in fp32."""
        raw = self._reader.read(block.first * self._row, len(block.base) * self._row)
        return widened(raw, self.dtype).reshape(-1, self._columns)


def wrong_rows(op: Op, sources: Sources, merged: Source) -> tuple[int, int]:
    """Recompute sampled rows in fp64. Returns the number of elements, and of wrong ones.

    Where the update may be on either side of two steps, either rounding is right.
    """
    expected, elements, wrong = Expected(op, sources, np.float64), 0, 0
    read = _as_trained(op, sources) if _is_dequantized(op) else None
    with Merged(merged, op.name, op.shape) as written:
        for block in expected.blocks(expected.sampled_rows(), read):
            values = written.rows(block)
            low, high = _rounded_range(op, block)
            wrong += int(np.count_nonzero(~((low <= values) & (values <= high))))
            elements += values.size
    return elements, wrong


def _rounded_range(op: Op, block: Block) -> tuple[Array, Array]:
    """Return the smallest and the largest right value of each element of a merge of ours."""
    exact, slack = block.base + block.change, _fp32_error(block, changed=bool(op.terms))
    edges = exact - slack, exact + slack
    low, high = (_nearest(edge, op.dtype) for edge in edges)
    if op.unbiased and op.dtype in GRIDS:
        parts = random_parts(op.name, block.first, *exact.shape)
        down, up = (round_with(edge, parts, op.dtype) for edge in edges)
        # A replaced tensor has no base to compare with: every element is rounded without bias.
        size = np.abs(block.change)
        sure = small(size + slack, block.base, op.dtype) | (not op.terms)
        maybe = small(size - slack, block.base, op.dtype) | (not op.terms)
        low, high = (
            np.where(sure, own, np.where(maybe, pick(own, near), near))
            for own, near, pick in ((down, low, np.minimum), (up, high, np.maximum))
        )
    return low, high


def _fp32_error(block: Block, *, changed: bool) -> Array:
    """Return a bound of the rounding error of an fp32 merge, before its last rounding."""
    values = block.base + block.change
    error = 2 * _UNIT * np.abs(block.base)
    if block.stretch is not None:
        error *= np.abs(block.stretch)
    for product in block.parts:
        size = np.abs(product.left) @ np.abs(product.right)
        error[product.rows] += product.roundings * _UNIT * size
    if block.stretch is not None:
        # Norms in fp32 sum squares in any order.
        error += (8 + sqrt(values.size / block.stretch.size)) * _UNIT * np.abs(values)
    return error + 2 * _UNIT * np.abs(values) if changed else error


def _nearest(values: Array, dtype: str) -> Array:
    """Round to fp32 and then to a dtype, as a merge does; monotone."""
    with np.errstate(over="ignore"):
        wide = values.astype(np.float32)
    return rounded(wide, dtype)


def _is_dequantized(op: Op) -> bool:
    """Return True if the merge goes into the base as QLoRA training quantized it."""
    how = op.quantization
    return how is not None and how["base"] == "dequantized"


def _as_trained(op: Op, sources: Sources) -> Callable[[int, int], Array]:
    """Return a reader of rows of the base as QLoRA training quantized it, in fp32; needs torch."""
    import torch

    from tasks.weights.quantized.nf4 import RowsAsTrained

    how, columns = op.quantization or {}, matrix_shape(op.shape)[1]
    if op.transpose or how.get("turned"):  # `RowsAsTrained` does not support these
        matrix = full_tensor(op, sources, Measured()).reshape(-1, columns)
        return lambda first, end: matrix[first:end].float().numpy()
    with opened(op, sources) as reader:
        stored = torch.from_numpy(reader.read()).view(torch_dtype(op.source_dtype))
    loaded = stored.reshape(-1, columns).to(torch_dtype(DTYPE_NAMES[how["loaded_dtype"]]))
    quantized = RowsAsTrained(loaded, how)
    return lambda first, end: quantized.rows(first, end).float().numpy()


def compare(
    op: Op, sources: Sources, merged: Merged, *, scale: float = 1.0, packed: bool = False
) -> Sums:
    """Compare all rows with a merge in any arithmetic, in fp32, a few MB at a time.

    Ends early if a mistake explains little: a factor `scale` on the change other than 1, or a base
    that was quantised to 4 bits and dequantised (`packed`).
    """
    expected, sums = Expected(op, sources), Sums()
    comparison = _Comparison(expected, merged.grid, scale, packed)
    turned = bool((op.quantization or {}).get("turned"))
    few = _EXCEPT * expected.rows * expected.columns
    for block in expected.blocks(expected.all_rows(whole=packed and turned)):
        block_sums = comparison.add(block, merged.rows(block))
        sums = sums + block_sums
        if not comparison.exact and sums.beyond > few + _EXCEPT_FIRST * block_sums.elements:
            break
    return sums


@dataclass(frozen=True)
class _Comparison:
    """Plan for comparing one tensor of a foreign merge; `grid` as of `Merged`."""

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


def may_be_packed(op: Op) -> bool:
    """Return True if the base may have been quantised: 4-bit blocks end where row blocks do."""
    rows, columns = op.shape if len(op.shape) == 2 else (1, 1)
    whole = rows * columns % _PACKED == 0 and columns * 16 % _PACKED == 0
    return min(rows, columns) > 1 and whole
