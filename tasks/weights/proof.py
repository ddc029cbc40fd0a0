"""Prove a merge from the files alone: every tensor is `base + scale * B A`.

    results = recompute(plan, sources, merged)              # a merge of ours: sampled rows, in fp64
    require([recomputed_check(results)], stage="merge")

    made = planned(base, adapter)                           # a merge by any tool: all rows
    proof = prove_merge(made.plan, made.sources, merged, tied=made.tied)
    proof.ok, proof.faults[0].name, proof.faults[0].state

Model outputs cannot show a small fault: after five steps an adapter hardly changes a
log-probability, and a module that was left out changes none. So values are read back and compared
with those that `expected` computes with numpy: it shares no arithmetic with `compute`.

A merge of ours adds in fp32 and rounds once, in a way that is known: an element is wrong if it is
not the rounding of a number within fp32's error of the exact sum. Other tools round the product,
the sum, sometimes the base before it: an element may be off by one unit in the last place (ulp) of
the coarsest dtype involved. Errors within that bound have no direction, so the factor by which the
change was added is 1 up to their noise: a scale that is wrong by a percent moves that factor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import sqrt
from pathlib import Path

import numpy as np

from tasks.core.contract import Check
from tasks.weights.compute import opened
from tasks.weights.expected import (
    Array,
    Block,
    Values,
    base_of,
    blocks,
    comparable,
    random_parts,
    round_with,
    small,
)
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES, MANTISSA, NUMPY, rounded, torch_dtype, ulp
from tasks.weights.files.tensors import Sources, Tensor, Tensors, read_all
from tasks.weights.heads import detect, read_folder
from tasks.weights.lora import read_adapter
from tasks.weights.merge import BASE, Reward, plan_adapter
from tasks.weights.model import Perform, perform
from tasks.weights.plan import Op, Plan, Planned, is_dora, matrix_shape
from tasks.weights.quantized.packed import LEVELS
from tasks.weights.rounding import GRIDS

_HINT = "merge again: force=[merge]; if it fails again, suspect the disk or the memory"
_UNIT = 2.0**-24
"""Largest relative error of one rounding in fp32."""


# A merge of ours.


@dataclass
class Recomputed:
    """Result of the recomputation of one tensor."""

    name: str
    elements: int = 0
    wrong: int = 0  # elements that differ from base plus adapter by more than rounding
    skipped: str = ""  # reason why it was not recomputed


def recompute(plan: Plan, sources: Sources, merged: Tensors) -> list[Recomputed]:
    """Recompute sampled rows of every tensor of a merge of ours, in fp64."""
    results = []
    for op in plan.ops:
        reason = comparable(op, sources)
        if not reason and op.dtype not in NUMPY:
            reason = f"written as {op.dtype}"
        result = Recomputed(op.name, skipped=reason)
        results.append(result)
        if reason:
            continue
        with Values(merged[op.name], op.shape) as written:
            read = _rows_as_trained(op, sources)
            for block in blocks(op, sources, np.float64, sampled=True, read=read):
                values = written.rows(block.first, block.first + len(block.base))
                low, high = _rounded_range(op, block)
                result.wrong += int(np.count_nonzero(~((low <= values) & (values <= high))))
                result.elements += values.size
    return results


def recomputed_check(results: Sequence[Recomputed]) -> Check:
    """Return one check for all tensors; it names the first that are wrong."""
    wrong = [f"{r.name} ({r.wrong} of {r.elements})" for r in results if r.wrong]
    skipped = [result for result in results if result.skipped]
    text = f"{sum(r.elements for r in results)} elements of {len(results)} tensors are"
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        text = f"{len(wrong)} of {len(results)} tensors are not: {', '.join(wrong[:3])}{more}"
    if skipped:
        text += f"; {len(skipped)} not recomputed: {skipped[0].name}, {skipped[0].skipped}"
    expected = "base + scale * B A, rounded once"
    return Check("sampled rows", expected, text, ok=not wrong, hint=_HINT)


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
        # Norms in fp32 sum squares in any order.
        sums = 8 + sqrt(values.shape[1])
        error = error * np.abs(block.stretch) + sums * _UNIT * np.abs(values)
    error = error + block.roundings * _UNIT * block.size
    return error + 2 * _UNIT * np.abs(values) if changed else error


def _nearest(values: Array, dtype: str) -> Array:
    """Round to fp32 and then to a dtype, as a merge does; monotone."""
    with np.errstate(over="ignore"):
        return rounded(values.astype(np.float32), dtype)


def _rows_as_trained(op: Op, sources: Sources) -> Callable[[int, int], Array] | None:
    """Return a reader of rows of the base as QLoRA training quantized it; None for the stored."""
    how = op.quantization
    if how is None or how["base"] != "dequantized":
        return None
    import torch

    from tasks.weights.quantized.nf4 import RowsAsTrained, as_trained

    with base_of(op, sources) as stored:
        values = torch.from_numpy(stored.rows(0, matrix_shape(op.shape)[0]))
    loaded = values.to(torch_dtype(DTYPE_NAMES[how["loaded_dtype"]]))
    if how.get("turned"):  # `RowsAsTrained` does not support it
        matrix = as_trained(loaded, how)
        return lambda first, end: matrix[first:end].float().numpy()
    rows = RowsAsTrained(loaded, how)
    return lambda first, end: rows.rows(first, end).float().numpy()


# A merge by any tool.


def planned(base: Path, adapter: Path, *, perform: Perform = perform) -> Planned:
    """Plan the merge of an adapter folder into its base from headers; nothing is written.

    Raises:
        ContractError: base and adapter do not fit; names every problem.
        ArtifactError: a file cannot be read.
    """
    folder, config = read_folder(adapter), read_json(base / "config.json")
    return plan_adapter(
        folder.adapter or read_adapter(adapter),
        base,
        config,
        model_dtype="bfloat16",
        reward=Reward() if detect(folder).is_of_reward else None,
        values=False,
        perform=perform,
    )


class State(StrEnum):
    """Result of the comparison of one tensor."""

    RIGHT = "right"
    WRONG = "wrong"
    MISSING = "not there"
    NOT_COMPARED = "not compared"


SCALE_MARGIN, DORA_MARGIN, SIGMAS = 0.005, 0.05, 6.0
"""Tolerance of the factor around 1, on top of rounding noise. DoRA's norms are rounded as well, for
whole rows at once."""
_FLOOR = 2.0**-24
"""Absolute error of the smallest numbers in an fp16 merge."""
_DORA_ULPS, _ROUNDED_TWICE_ULPS = 4.0, 2.0
_PRODUCT_BITS = 9
"""Least precision of a product in an fp32 merge: GPUs may multiply in TF32 (10 bits)."""
_EXCEPT = 0.005
"""Share of elements that a base in 4 bits may leave unexplained: values between two levels."""
_PACKED, _PACKED_SCALE_ERROR = 64, 0.08
"""Elements that share a scale in bitsandbytes' 4 bits, and the largest relative error of a scale in
8 bits."""


@dataclass
class Fit:
    """Rest of a tensor along a direction, as a factor of it: sums over the elements."""

    norm: float = 0.0  # squared norm of the direction
    inner: float = 0.0  # inner product of what is left with it
    spread: float = 0.0  # sum of the squared products of both

    def add(self, direction: Array, left: Array) -> None:
        """Add the sums of one block."""
        self.norm += float(np.vdot(direction, direction))
        self.inner += float(np.vdot(left, direction))
        self.spread += float(np.square(left * direction).sum())

    @property
    def factor(self) -> float:
        """Factor of the direction that is left; 0 without a direction."""
        return self.inner / self.norm if self.norm else 0.0

    @property
    def noise(self) -> float:
        """Standard deviation of the factor."""
        return sqrt(self.spread) / self.norm if self.norm else 0.0

    def __add__(self, other: Fit) -> Fit:
        spread = self.spread + other.spread
        return Fit(self.norm + other.norm, self.inner + other.inner, spread)


@dataclass
class Sums:
    """Comparison of a tensor: base W, exact change D times a factor, merged values Q."""

    elements: int = 0
    beyond: int = 0  # elements further from the wanted value than rounding explains
    same: bool = True  # every element equals the base's, rounded
    exact: Fit = field(default_factory=Fit)  # Q - W - D, along the exact change
    nearest: Fit = field(default_factory=Fit)  # along the change after rounding to nearest

    @property
    def kept_share(self) -> float:
        """Share of the exact change that the merged values keep; 1 without a change."""
        return 1.0 + self.exact.factor

    @property
    def closest(self) -> tuple[float, float]:
        """Factor on the change and its noise under the rounding that explains more."""
        fits = [fit for fit in (self.exact, self.nearest) if fit.norm] or [self.exact]
        fit = min(fits, key=lambda each: abs(each.factor) - SIGMAS * each.noise)
        return 1.0 + fit.factor, fit.noise

    def is_once(self, margin: float) -> bool:
        """Return True if the change was added once: the factor is 1 up to margin and noise."""
        factor, noise = self.closest
        return abs(factor - 1.0) <= margin + SIGMAS * noise


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of one tensor of the merged model."""

    name: str  # key in the merged model
    state: State
    touched: bool  # the adapter changes it
    dequantized: bool = False  # its base was quantized to 4 bits and dequantized
    sums: Sums | None = None  # None if it was not compared
    note: str = ""  # why it was not compared, or a difference that is not wrong


@dataclass(frozen=True)
class Proof:
    """All verdicts, in the order of the plan."""

    verdicts: tuple[Verdict, ...]
    scale: float = 1.0  # factor on the change, estimated over all right tensors without DoRA
    noise: float = 0.0  # its standard deviation
    kept: float = 1.0  # share of the exact change that these tensors have after rounding

    @property
    def ok(self) -> bool:
        """True if every tensor was compared and is right."""
        return not self.faults and not self.of(State.NOT_COMPARED) and not self.drifts

    @property
    def drifts(self) -> bool:
        """True if the common factor is wrong, though each tensor is within its noise."""
        return abs(self.scale - 1.0) > SCALE_MARGIN + SIGMAS * self.noise

    @property
    def faults(self) -> tuple[Verdict, ...]:
        """Verdicts of the wrong tensors."""
        fine = (State.RIGHT, State.NOT_COMPARED)
        return tuple(verdict for verdict in self.verdicts if verdict.state not in fine)

    def of(self, state: State) -> tuple[Verdict, ...]:
        """Return the verdicts of one state."""
        return tuple(verdict for verdict in self.verdicts if verdict.state is state)


def prove_merge(
    plan: Plan, sources: Sources, merged: Tensors, *, tied: Mapping[str, str] | None = None
) -> Proof:
    """Compare a merged model with the plan of its merge, by values and not bytes.

    Accepts the base as stored, and quantised to 4 bits and dequantised. `tied` is that of
    `Planned`. Raises ArtifactError if a file cannot be read.
    """
    tied = dict(tied or {})
    ops = {op.name: op for op in plan.ops}
    wanted = [op for op in plan.ops if op.name in merged or op.name not in tied]
    # Tied tensors that are stored must equal the tensor that they are tied to.
    wanted += [
        replace(ops[holder], name=alias)
        for alias, holder in tied.items()
        if alias in merged and alias not in ops and holder in ops
    ]
    with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
        verdicts = tuple(pool.map(lambda op: _verdict(op, sources, merged), wanted))
    total = Sums()
    for op, verdict in zip(wanted, verdicts, strict=True):
        right = verdict.state is State.RIGHT and verdict.touched and not verdict.dequantized
        if right and verdict.sums is not None and not is_dora(op):
            total.exact += verdict.sums.exact
            total.nearest += verdict.sums.nearest
    return Proof(verdicts, *total.closest, total.kept_share)


def _verdict(op: Op, sources: Sources, merged: Tensors) -> Verdict:
    """Compare one tensor."""
    touched = bool(op.terms) or op.input != BASE
    stored = merged.get(op.name)
    if stored is None:
        return Verdict(op.name, State.MISSING, touched)
    note, shape = comparable(op, sources), tuple(stored.shape)
    if not note and stored.dtype not in NUMPY:
        note = f"stored in {stored.dtype}"
    if note and not touched and _same_bytes(op, sources, stored):
        return Verdict(op.name, State.RIGHT, touched)
    rows = _common_rows(op, shape)
    if not note and shape != op.shape and not rows:
        note = f"shape {list(shape)}, expected {list(op.shape)}"
    if note:
        return Verdict(op.name, State.NOT_COMPARED, touched, note=note)
    if shape != op.shape:
        note = f"{shape[0]} rows, {op.shape[0]} in the base: {rows} are compared"
        op = replace(op, shape=(rows, *op.shape[1:]))
    with Values(stored, op.shape) as values:
        sums = compare(op, sources, values)
        packed, right = False, sums.is_once(DORA_MARGIN if is_dora(op) else SCALE_MARGIN)
        if not (right := right and not sums.beyond) and _may_be_packed(op):
            guess = compare(op, sources, values, packed=True)
            few = guess.beyond <= _EXCEPT * guess.elements
            same = bool(op.terms) and sums.same
            right = packed = few and guess.is_once(SCALE_MARGIN) and not same
    state = State.RIGHT if right else State.WRONG
    return Verdict(op.name, state, touched, packed, sums, note)


def _common_rows(op: Op, shape: Sequence[int]) -> int:
    """Return the number of rows that two embeddings share; 0 for other shapes."""
    matrices = len(op.shape) == len(shape) == 2 and op.shape[1] == shape[1]
    return 0 if not matrices or op.transpose else min(op.shape[0], shape[0])


def _same_bytes(op: Op, sources: Sources, tensor: Tensor) -> bool:
    if op.packed is not None or op.transpose or tensor.dtype != op.source_dtype:
        return False
    with opened(op, sources) as base:
        return np.array_equal(base.read(), read_all(tensor))


def _may_be_packed(op: Op) -> bool:
    """Return True if the base may have been quantised: 4-bit blocks end where row blocks do."""
    rows, columns = op.shape if len(op.shape) == 2 else (1, 1)
    whole = rows * columns % _PACKED == 0 and columns * 16 % _PACKED == 0
    return min(rows, columns) > 1 and whole


def compare(op: Op, sources: Sources, merged: Values, *, packed: bool = False) -> Sums:
    """Compare all rows with a merge in any arithmetic, in fp32, a few MB at a time.

    `packed` compares with a base that was quantised to 4 bits and dequantised.
    """
    touched = bool(op.terms)
    stored = op.source_dtype if op.packed is None else DTYPE_NAMES.get(op.packed["dtype"], "F32")
    narrowed = MANTISSA[merged.grid] < MANTISSA[stored]
    coarse = merged.grid if narrowed else stored
    sums = Sums()
    for block in blocks(op, sources):
        base, change = block.base, block.change
        values = merged.rows(block.first, block.first + len(base))
        if packed:
            base = rounded(_through_nf4(base, values - change), coarse)
        near = rounded(base, merged.grid) if narrowed else base
        nearest = rounded(base + change, merged.grid) if touched else near
        sums.elements += values.size
        sums.same = sums.same and np.array_equal(values, near)
        if touched:
            sums.exact.add(change, np.nan_to_num(values - base) - change)
            sums.nearest.add(nearest - near, np.nan_to_num(values - nearest))
        wanted = base + change if packed and touched else nearest
        at = ~(values == wanted)
        if at.any():
            bound = np.full(np.count_nonzero(at), _FLOOR)
            if packed or touched or merged.grid != stored:
                ulps = _ROUNDED_TWICE_ULPS if narrowed or packed else 1.0
                ulps = max(ulps, _DORA_ULPS) if is_dora(op) else ulps
                size = np.maximum(np.abs(base), np.abs(base + change))[at]
                bits = min(MANTISSA.get(op.dtype, 23), MANTISSA[stored], _PRODUCT_BITS)
                bound += ulps * 1.001 * ulp(size, coarse) + 2.0**-bits * block.size[at]
            error = np.abs(values[at].astype(np.float64) - wanted[at])
            sums.beyond += int(np.count_nonzero(~(error <= bound)))
    return sums


def _through_nf4(base: Array, rest: Array) -> Array:
    """Return the base quantised to NF4 and dequantised.

    The scale of each 4-bit block is fitted to `rest`, the merged values without the change: double
    quantisation rounds it to 8 bits.
    """
    levels = np.array(sorted(LEVELS["nf4"]), np.float32)
    shape = base.shape
    base, rest = base.reshape(-1, _PACKED), rest.reshape(-1, _PACKED)
    peak = np.abs(base).max(axis=1, keepdims=True)
    middles = (levels[1:] + levels[:-1]) / 2
    picked = levels[np.searchsorted(middles, base / np.where(peak, peak, 1))]
    size = np.square(picked).sum(axis=1, keepdims=True)
    fitted = (rest * picked).sum(axis=1, keepdims=True) / np.where(size, size, 1)
    most = _PACKED_SCALE_ERROR
    fitted = np.clip(fitted, peak * (1 - most), peak * (1 + most))
    scaled: Array = (picked * fitted).reshape(shape)
    return scaled
