"""Prove a merge by any tool from the files alone: every tensor is `base + scale * B A`.

    plan = planned(base, adapter)                  # of the merge of two folders
    proof = prove_merge(plan.plan, plan.sources, merged)
    proof.ok, proof.faults[0].name, proof.faults[0].state

Model outputs cannot show a small fault: after five steps an adapter hardly changes a
log-probability, and a module that was left out changes none. So values are read back and compared
with those that `expected` computes with numpy: it shares no arithmetic with `execute`.

Other tools round the product, the sum, sometimes the base before it: an element may be off by one
unit in the last place (ulp) of the coarsest dtype involved. Errors within that bound have no
direction, so the factor by which the change was added is 1 up to their noise: a scale that is wrong
by a percent moves that factor.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import sqrt
from pathlib import Path

import numpy as np

from tasks.weights.execute.worker import Perform, perform
from tasks.weights.expected import BASE, Array, Values, base_of, blocks, comparable
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import (
    DTYPE_NAMES,
    MANTISSA,
    NUMPY,
    rounded,
    ulp,
)
from tasks.weights.files.tensors import Sources, Tensors
from tasks.weights.head_plans import merged_reward
from tasks.weights.heads import detect, read_folder
from tasks.weights.lora import changes, read_adapter
from tasks.weights.merge import MergeSettings, plan_merge
from tasks.weights.model import Model, model_facts
from tasks.weights.plan import (
    Dora,
    Op,
    Plan,
    needs_all_rows,
)
from tasks.weights.quantized.packed import LEVELS
from tasks.weights.quantized.source import decoding, open_model


@dataclass(frozen=True)
class Planned:
    """Plan of a merge and its inputs."""

    plan: Plan
    sources: Sources
    # keys that a merged checkpoint may hold or not -> keys that hold the same tensor
    tied: Mapping[str, str]
    live: Model | None = None  # the model in memory; None for a reward model


def planned(base: Path, adapter: Path, *, perform: Perform = perform) -> Planned:
    """Plan the merge of an adapter folder into its base from headers; nothing is written.

    Raises:
        ContractError: base and adapter do not fit; names every problem.
        ArtifactError: a file cannot be read.
    """
    folder = read_folder(adapter)
    read, model = read_adapter(adapter, beside=folder.beside), open_model(base)
    if detect(folder).is_of_reward:
        config, settings = read_json(base / "config.json"), MergeSettings(base=BASE)
        merge = merged_reward(read, model, config, settings, dtype="bfloat16", perform=perform)
        return Planned(decoding(merge.plan, merge.sources), merge.sources, {})
    disk = {key: tuple(info.shape) for key, info in model.items()}
    facts = perform(model_facts, base, "bfloat16", disk)
    infos = {f"{read.name}:{key}": info for key, info in read.tensors.items()}
    plan = plan_merge(model, facts, changes([(read, 1.0)], facts), infos)
    sources = {BASE: model, read.name: read.tensors}
    tied = {key: to for key, to in facts.tied.items() if key not in plan.untied}
    return Planned(decoding(plan, sources), sources, tied, facts)


class State(StrEnum):
    """Result of the comparison of one tensor."""

    RIGHT = "right"
    LEFT_OUT = "left out"
    TWICE = "merged twice"
    SCALED = "scaled wrongly"
    CHANGED = "changed otherwise"
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
_EXCEPT, _NEAR = 0.005, 0.03
"""Share of elements that a mistake may leave unexplained (values between two 4-bit levels), and
distance of a factor from 0 or 2 that is those."""
_PACKED, _PACKED_SCALE_ERROR = 64, 0.08
"""Elements that share a scale in bitsandbytes' 4 bits, and the largest relative error of a scale in
8 bits."""


@dataclass
class Sums:
    """Counts and sums over a tensor: base W, exact change D, wanted values, merged values Q."""

    elements: int = 0
    beyond: int = 0  # elements further from the wanted value than rounding explains
    same: bool = True  # every element equals the base's, rounded
    energy: float = 0.0  # squared norm of the change after rounding to nearest
    error: float = 0.0  # inner product of the difference from it with that change
    spread: float = 0.0  # sum of the squared products of both
    update: float = 0.0  # squared norm of D
    kept: float = 0.0  # `<Q - W, D>`
    scatter: float = 0.0  # sum of the squared products of D and of what Q gained more than wanted

    @property
    def kept_share(self) -> float:
        """Share of the exact change that the merged values keep; 1 without a change."""
        return self.kept / self.update if self.update else 1.0

    def left(self, scale: float = 1.0) -> list[tuple[float, float]]:
        """Return what is left of the change and its noise, to nearest and without bias."""
        if not self.update:
            return [(0.0, 0.0)]
        left = [(self.kept_share - scale, sqrt(self.scatter) / self.update)]
        if self.energy:
            left.append((self.error / self.energy, sqrt(self.spread) / self.energy))
        return left

    @property
    def closest(self) -> tuple[float, float]:
        """Factor on the change and its noise under the rounding that explains more."""
        left, noise = min(self.left(), key=lambda pair: abs(pair[0]) - SIGMAS * pair[1])
        return 1.0 + left, noise

    def is_right(self, margin: float) -> bool:
        """Return True if rounding, to nearest or without bias, explains every difference."""
        factor, noise = self.closest
        return not self.beyond and abs(factor - 1.0) <= margin + SIGMAS * noise

    def explain(self, scale: float) -> bool:
        """Return True if a mistake explains the tensor, and nothing of the change is left."""
        return self.beyond <= _EXCEPT * self.elements and any(
            abs(left) <= SCALE_MARGIN + SIGMAS * noise for left, noise in self.left(scale)
        )

    def add(
        self,
        base: Array,
        exact: Array,
        change: Array,
        merged: Array,
        nearest: Array,
        near: Array,
    ) -> None:
        """Add the sums of one block; `change` is the exact one times the factor of a mistake."""
        gained = np.nan_to_num(merged - base)
        self.update += float(np.vdot(exact, exact))
        self.kept += float(np.vdot(gained, exact))
        self.scatter += float(np.square((gained - change) * exact).sum())
        moved, error = nearest - near, np.nan_to_num(merged - nearest)
        self.energy += float(np.vdot(moved, moved))
        self.error += float(np.vdot(error, moved))
        self.spread += float(np.square(error * moved).sum())

    def __add__(self, other: Sums) -> Sums:
        names = [each.name for each in fields(self) if each.name != "same"]
        added = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Sums(**added, same=self.same and other.same)


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of one tensor of the merged model."""

    name: str  # key in the merged model
    state: State
    touched: bool  # the adapter changes it
    scale: float = 1.0  # factor by which the change was added, if that is the fault
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

    Accepts the base as stored, and quantised to 4 bits and dequantised.

    Args:
        plan: plan of the merge, from `planned`, `plan_merge` or a merge's manifest.
        sources: inputs of the plan by name.

    Raises:
        ArtifactError: a file cannot be read.
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
        if right and verdict.sums is not None and not _is_dora(op):
            total += verdict.sums
    return Proof(verdicts, *total.closest, total.kept_share)


def _verdict(op: Op, sources: Sources, merged: Tensors) -> Verdict:
    """Compare one tensor, and diagnose it if it is wrong."""
    touched = bool(op.terms) or op.input != BASE
    stored = merged.get(op.name)
    if stored is None:
        return Verdict(op.name, State.MISSING, touched)
    note, shape = "", tuple(stored.shape)
    reason = comparable(op, sources)
    if not reason and stored.dtype not in NUMPY:
        reason = f"stored in {stored.dtype}"
    if reason:
        if not touched and _same_bytes(op, sources, merged):
            return Verdict(op.name, State.RIGHT, touched)
        return Verdict(op.name, State.NOT_COMPARED, touched, note=reason)
    if shape != op.shape:
        rows = _common_rows(op, shape)
        if not rows:
            note = f"shape {list(shape)}, expected {list(op.shape)}"
            return Verdict(op.name, State.NOT_COMPARED, touched, note=note)
        note = f"{shape[0]} rows, {op.shape[0]} in the base: {rows} are compared"
        op = replace(op, shape=(rows, *op.shape[1:]))
    with Values(merged, op.name, stored.dtype, op.shape) as values:
        sums = compare(op, sources, values)
        state, scale, packed = State.RIGHT, 1.0, False
        if not sums.is_right(DORA_MARGIN if _is_dora(op) else SCALE_MARGIN):
            state, scale, packed = _diagnosis(op, sources, values, sums)
    return Verdict(op.name, state, touched, scale, packed, sums, note)


def _diagnosis(op: Op, sources: Sources, values: Values, sums: Sums) -> tuple[State, float, bool]:
    """Return what is wrong with a tensor, the factor on its change, and if its base is 4-bit."""
    if op.terms and sums.same:
        return State.LEFT_OUT, 1.0, False
    factors = (1.0, 0.0, 2.0) if op.terms else (1.0,)
    guesses = [(scale, True) for scale in factors] if _may_be_packed(op) else []
    if op.terms and abs(sums.kept_share - 1.0) > SCALE_MARGIN:
        guesses.append((sums.kept_share, False))
    for scale, packed in guesses:
        if compare(op, sources, values, scale=scale, packed=packed).explain(scale):
            return _state_of(scale), scale, packed
    return State.CHANGED, 1.0, False


def _state_of(scale: float) -> State:
    if abs(scale - 1.0) <= SCALE_MARGIN:
        return State.RIGHT
    if abs(scale) <= _NEAR:
        return State.LEFT_OUT
    return State.TWICE if abs(scale - 2.0) <= _NEAR else State.SCALED


def _is_dora(op: Op) -> bool:
    return any(isinstance(term, Dora) for term in op.terms)


def _common_rows(op: Op, shape: Sequence[int]) -> int:
    """Return the number of rows that two embeddings share; 0 for other shapes."""
    matrices = len(op.shape) == len(shape) == 2 and op.shape[1] == shape[1]
    if not matrices or op.transpose or any(map(needs_all_rows, op.terms)):
        return 0
    return min(op.shape[0], shape[0])


def _same_bytes(op: Op, sources: Sources, merged: Tensors) -> bool:
    dtype = merged[op.name].dtype
    if op.packed is not None or op.transpose or dtype != op.source_dtype:
        return False
    with (
        base_of(op, sources) as base,
        Values(merged, op.name, dtype, merged[op.name].shape) as values,
    ):
        return np.array_equal(base.raw(), values.raw())


def _may_be_packed(op: Op) -> bool:
    """Return True if the base may have been quantised: 4-bit blocks end where row blocks do."""
    rows, columns = op.shape if len(op.shape) == 2 else (1, 1)
    whole = rows * columns % _PACKED == 0 and columns * 16 % _PACKED == 0
    return min(rows, columns) > 1 and whole


def compare(
    op: Op, sources: Sources, merged: Values, *, scale: float = 1.0, packed: bool = False
) -> Sums:
    """Compare all rows with a merge in any arithmetic, in fp32, a few MB at a time.

    Args:
        scale: factor on the change; 1 for a right merge.
        packed: True to compare with a base that was quantised to 4 bits and dequantised.
    """
    how, touched, exact = op.quantization or {}, bool(op.terms), scale == 1.0 and not packed
    kind, turned = how.get("type", "nf4"), bool(how.get("turned"))
    stored = op.source_dtype if op.packed is None else DTYPE_NAMES.get(op.packed["dtype"], "F32")
    narrowed = MANTISSA[merged.grid] < MANTISSA[stored]
    coarse = merged.grid if narrowed else stored
    sums = Sums()
    for block in blocks(op, sources, whole=packed and turned):
        base, change = block.base, block.change * np.float32(scale)
        values = merged.rows(block.first, block.first + len(base))
        if packed:
            rest = values - change
            base = _through_4_bits(base.T, rest.T, kind).T if turned else (
                _through_4_bits(base, rest, kind)
            )  # fmt: skip
            base = rounded(base, coarse)
        near = rounded(base, merged.grid) if narrowed else base
        nearest = rounded(base + change, merged.grid) if touched else near
        sums.elements += values.size
        sums.same = sums.same and np.array_equal(values, near)
        if touched:
            sums.add(base, block.change, change, values, nearest, near)
        wanted = nearest if exact or not touched else base + change
        at = ~(values == wanted)
        if at.any():
            bound = np.full(np.count_nonzero(at), _FLOOR)
            if not exact or touched or merged.grid != stored:
                ulps = _ROUNDED_TWICE_ULPS if narrowed or not exact else 1.0
                ulps = max(ulps, _DORA_ULPS) if _is_dora(op) else ulps
                size = np.maximum(np.abs(base), np.abs(base + change))[at]
                bits = min(MANTISSA.get(op.dtype, 23), MANTISSA[stored], _PRODUCT_BITS)
                bound += ulps * 1.001 * ulp(size, coarse) + 2.0**-bits * block.size[at]
            error = np.abs(values[at].astype(np.float64) - wanted[at])
            sums.beyond += int(np.count_nonzero(~(error <= bound)))
    return sums


def _through_4_bits(base: Array, rest: Array, kind: str) -> Array:
    """Return the base quantised to 4 bits and dequantised.

    The scale of each 4-bit block is fitted to `rest`, the merged values without the change: double
    quantisation rounds it to 8 bits.
    """
    levels = np.array(sorted(LEVELS[kind]), np.float32)
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
