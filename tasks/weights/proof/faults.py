"""Diagnose one wrong tensor of a merge: test hypotheses against its values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import sqrt

import numpy as np

from tasks.weights.files.dtype_conversion import ulp
from tasks.weights.files.source import Source
from tasks.weights.proof.compare import FLOOR, SCALE_MARGIN, SIGMAS, Merged, Sums, Unit, coarsest
from tasks.weights.proof.expected import Array, Block, Expected, Sources
from tasks.weights.quantized.packed import LEVELS

_ULPS = 2.0
_EXCEPT, _EXCEPT_FIRST = 0.005, 0.05
"""Share of elements that a hypothesis may leave unexplained: values between two NF4 levels."""
_BETTER = 0.5
"""A hypothesis has to leave at most this share of the squared difference."""
_BLOCK = 64
"""Elements that share a scale in bitsandbytes' 4 bits."""
_SAMPLE_ROWS = 16
Value = Callable[[Block, Array], Array]
"""Computes a block's values under a hypothesis from the block and the merged model's values."""


class State(StrEnum):
    """Result of the check of one tensor. The value is the text shown to users."""

    RIGHT = "right"
    LEFT_OUT = "left out"
    TWICE = "merged twice"
    SCALED = "scaled wrongly"
    TRANSPOSED = "transposed"
    EXPERT = "another expert's"
    BASE_MODE = "merged into the other base"
    CHANGED = "changed otherwise"
    MISSING = "not there"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Fault:
    """A diagnosis.

    Attributes:
        state: kind of the fault.
        scale: factor by which the change was added, if that is the fault.
        like: the other expert whose tensor it is.
        dequantized: True if the base was quantized to 4 bits and dequantized.
    """

    state: State
    scale: float = 1.0
    like: str = ""
    dequantized: bool = False


def diagnose(
    unit: Unit, sums: Sums, sources: Sources, merged: Source, siblings: Sequence[Unit] = ()
) -> Fault:
    """Find the fault that explains a tensor with wrong values.

    Args:
        unit: the tensor.
        sums: result of `compare`.
        sources: the inputs of the plan.
        merged: the merged model.
        siblings: the other experts of its layer and kind.

    Raises:
        ArtifactError: a file cannot be read.
    """
    touched = bool(unit.op.terms)
    if touched and sums.same:
        return Fault(State.LEFT_OUT)
    look = _Look(unit, sources, merged)
    return (
        look.dequantized(touched=touched)
        or (look.scaled() if touched else None)
        or (Fault(State.TRANSPOSED) if look.is_transposed() else None)
        or look.expert(siblings)
        or Fault(State.CHANGED)
    )


def _by_scale(scale: float, *, dequantized: bool = False) -> Fault:
    if abs(scale - 1.0) <= SCALE_MARGIN:
        return Fault(State.RIGHT, dequantized=dequantized)
    if abs(scale) <= _NEAR:
        return Fault(State.LEFT_OUT, dequantized=dequantized)
    state = State.TWICE if abs(scale - 2.0) <= _NEAR else State.SCALED
    return Fault(state, scale, dequantized=dequantized)


_NEAR = 0.03
_STEPS = 3
"""Iterations to estimate the factor on a 4-bit base: its block scales absorb part of the change."""
_SCALE_ERROR = 0.08
"""Largest relative error of a block's scale in 8 bits."""


@dataclass(frozen=True)
class _Fit:
    """Quality of a hypothesis about a tensor.

    Attributes:
        explains: True if it fits nearly every element, and far better than a right merge.
        rest: share of the change that is left over; 0 if its scale is right.
        noise: standard deviation of `rest`.
    """

    explains: bool
    rest: float
    noise: float

    @property
    def is_true(self) -> bool:
        """True if nothing of the change is left."""
        return self.explains and abs(self.rest) <= SCALE_MARGIN + SIGMAS * self.noise


class _Look:
    """Tests of hypotheses on one wrong tensor."""

    def __init__(self, unit: Unit, sources: Sources, merged: Source) -> None:
        self.unit = unit
        self.expected = Expected(unit.op, sources)
        self._sources, self._source = sources, merged
        quantization = unit.op.quantization or {}
        self._levels = np.array(sorted(LEVELS[quantization.get("type", "nf4")]), np.float32)
        self._bounds = (self._levels[1:] + self._levels[:-1]) / 2
        self._turned = bool(quantization.get("turned"))

    def dequantized(self, *, touched: bool) -> Fault | None:
        """Test a base that went through 4 bits, with the change and without it."""
        if not self._has_blocks:
            return None
        if not touched:
            fit = self._fit(partial(self._through_4_bits, 0.0))
            return Fault(State.RIGHT, dequantized=True) if fit.is_true else None
        scale = 1.0
        for _ in range(_STEPS):
            fit = self._fit(partial(self._through_4_bits, scale))
            if fit.is_true:
                return _by_scale(scale, dequantized=True)
            scale += fit.rest
            scale = next((likely for likely in (0.0, 2.0) if abs(scale - likely) <= _NEAR), scale)
        return None

    def scaled(self) -> Fault | None:
        """Test a change that was added with another factor."""
        scale = self._scale()
        fit = self._fit(lambda block, _: block.base + np.float32(scale) * block.change)
        return _by_scale(scale) if fit.is_true and abs(scale - 1.0) > SCALE_MARGIN else None

    def is_transposed(self) -> bool:
        """Return True if the tensor, or the change of it, is stored transposed."""
        rows = self.expected.rows
        if rows != self.expected.columns or rows < 2:
            return False
        whole = self.expected.block(0, rows)
        right = whole.base + whole.change
        wanted = (right.T, whole.base.T, whole.base + whole.change.T)
        return any(self._explains(whole, values, right) for values in wanted)

    def expert(self, siblings: Sequence[Unit]) -> Fault | None:
        """Test the tensors, and the changes, of the other experts."""
        if not siblings or self.expected.is_dora:
            return None
        rows = min(_SAMPLE_ROWS, self.expected.rows)
        own = self.expected.block(0, rows)
        for sibling in siblings:
            theirs = Expected(sibling.op, self._sources).block(0, rows)
            for base in (theirs.base, own.base):
                if self._explains(theirs, base + theirs.change, own.base + own.change):
                    return Fault(State.EXPERT, like=sibling.name)
        return None

    def _explains(self, block: Block, wanted: Array, right: Array) -> bool:
        """Return True if the rows of a block are `wanted` rather than `right`."""
        with Merged(self.unit, self._source) as values:
            merged = values.rows(0, len(wanted))
            error = self._error(block, merged, wanted, values.grid)
        before = float(np.square(merged - right, dtype=np.float64).sum())
        return error.unexplained <= _EXCEPT * merged.size and error.squares <= _BETTER * before

    def _fit(self, value: Value) -> _Fit:
        """Fit a hypothesis to the whole tensor; stop early if it fits badly."""
        unexplained, before, after = 0, 0.0, 0.0
        both, energy, spread = 0.0, 0.0, 0.0
        total = self.expected.rows * self.expected.columns
        with Merged(self.unit, self._source) as values:
            for block in self.expected.blocks(whole=self._turned):
                merged = values.rows(block.first, block.first + len(block.base))
                wanted = value(block, merged)
                error = self._error(block, merged, wanted, values.grid)
                unexplained += error.unexplained
                after += error.squares
                right = block.base + block.change
                before += float(np.square(merged - right, dtype=np.float64).sum())
                left = (merged - wanted).astype(np.float64) * block.change
                both += float(left.sum())
                spread += float(np.square(left).sum())
                energy += float(np.square(block.change, dtype=np.float64).sum())
                if unexplained > _EXCEPT * total + _EXCEPT_FIRST * merged.size:
                    break
        explains = unexplained <= _EXCEPT * total and after <= _BETTER * before
        if not energy:
            return _Fit(explains, 0.0, 0.0)
        return _Fit(explains, both / energy, sqrt(spread) / energy)

    def _through_4_bits(self, scale: float, block: Block, merged: Array) -> Array:
        """Return the base quantized to 4 bits and dequantized, plus the change.

        The scale of each 4-bit block is fitted: double quantisation rounds it to 8 bits.
        """
        change = np.float32(scale) * block.change
        base, rest = block.base, merged - change
        if self._turned:
            base, rest = base.T, rest.T
        shape = base.shape
        base, rest = base.reshape(-1, _BLOCK), rest.reshape(-1, _BLOCK)
        peak = np.abs(base).max(axis=1, keepdims=True)
        levels = self._levels[np.searchsorted(self._bounds, base / np.where(peak, peak, 1))]
        size = np.square(levels).sum(axis=1, keepdims=True)
        fitted = (rest * levels).sum(axis=1, keepdims=True) / np.where(size, size, 1)
        fitted = np.clip(fitted, peak * (1 - _SCALE_ERROR), peak * (1 + _SCALE_ERROR))
        value = (levels * fitted).reshape(shape)
        return (value.T if self._turned else value) + change

    def _scale(self) -> float:
        both, energy = 0.0, 0.0
        with Merged(self.unit, self._source) as values:
            for block in self.expected.blocks():
                merged = values.rows(block.first, block.first + len(block.base))
                change = block.change.astype(np.float64)
                both += float(((merged - block.base) * change).sum())
                energy += float(np.square(change).sum())
        return both / energy if energy else 0.0

    @property
    def _has_blocks(self) -> bool:
        """True if the tensor may have been quantized: its first rows divide into whole blocks."""
        op, columns = self.unit.op, self.expected.columns
        whole = self.expected.rows * columns % _BLOCK == 0 and columns * 16 % _BLOCK == 0
        return len(op.shape) == 2 and min(op.shape) > 1 and whole

    def _error(self, block: Block, merged: Array, wanted: Array, grid: str) -> _Error:
        coarse = coarsest(self.expected, grid)
        size = np.maximum(np.abs(wanted), np.abs(merged))
        bound = _ULPS * ulp(size, coarse) + FLOOR
        for left, right in block.norms:
            bound += self.expected.precision * np.outer(left, right)
        error = np.abs(merged.astype(np.float64) - wanted)
        unexplained = int(np.count_nonzero(~(error <= bound)))
        return _Error(unexplained, float(np.square(error).sum()))


@dataclass(frozen=True)
class _Error:
    """Number of elements that a hypothesis does not explain, and the sum of squared differences."""

    unexplained: int
    squares: float
