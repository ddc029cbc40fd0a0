"""Check every tensor of a merge.

proof = prove_merge(plan, {"base": base, "adapter": adapter}, merged)
proof.ok                      every tensor is what the plan says, up to rounding
proof.counts                  {State.RIGHT: 288, State.LEFT_OUT: 2}
proof.faults[0].name          and .state, .scale
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod

import numpy as np

from tasks.core.errors import ArtifactError
from tasks.weights.files.dtype_conversion import NUMPY
from tasks.weights.files.source import Source, info_of
from tasks.weights.plan.adapter_ops import Dora, LowRank, needs_all_rows
from tasks.weights.plan.operations import Op, Plan
from tasks.weights.proof.compare import (
    SCALE_MARGIN,
    SIGMAS,
    Merged,
    Sums,
    Unit,
    comparable,
    compare,
)
from tasks.weights.proof.expected import Sources, of_expert
from tasks.weights.quantized.packed import STORED

_THREADS = 4
_BLOCK = 1 << 20
_NEAR, _STEPS = 0.03, 3
"""Factors this near to 0 or 2 are those, and passes to estimate one on a 4-bit base, whose block
scales absorb part of the change."""
BASE = "base"
"""Name of the base among the inputs of a plan."""


class State(StrEnum):
    """Result of the check of one tensor. The value is the text shown to users."""

    RIGHT = "right"
    LEFT_OUT = "left out"
    TWICE = "merged twice"
    SCALED = "scaled wrongly"
    BASE_MODE = "merged into the other base"
    CHANGED = "changed otherwise"
    MISSING = "not there"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Verdict:
    """Result of the check of one tensor of the merged model.

    Attributes:
        name: key in the merged model; with `[3]` behind it for expert 3 of a stack.
        state: right, or the kind of its fault.
        touched: the adapter changes it.
        scale: factor by which the change was added, if that is the fault.
        dequantized: True if its base was quantized to 4 bits and dequantized.
        sums: counts of the comparison; None if there was none.
        note: reason why it was not compared, or a difference that is not wrong.
    """

    name: str
    state: State
    touched: bool
    scale: float = 1.0
    dequantized: bool = False
    sums: Sums | None = None
    note: str = ""


@dataclass(frozen=True)
class Proof:
    """All verdicts, in the order of the plan.

    Attributes:
        verdicts: one per tensor, and one per expert of a stack.
        extra: keys of the merged model that no operation of the plan makes.
        scale: factor on the change, estimated over all right tensors.
        noise: its standard deviation.
        kept: share of the adapter's exact change that the right tensors have after rounding.
    """

    verdicts: tuple[Verdict, ...]
    extra: tuple[str, ...] = ()
    scale: float = 1.0
    noise: float = 0.0
    kept: float = 1.0

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

    @property
    def counts(self) -> Mapping[State, int]:
        """Number of tensors by state."""
        return Counter(verdict.state for verdict in self.verdicts)

    def of(self, state: State) -> tuple[Verdict, ...]:
        """Verdicts of one state."""
        return tuple(verdict for verdict in self.verdicts if verdict.state is state)

    @property
    def dequantized(self) -> tuple[Verdict, ...]:
        """Verdicts of tensors whose base was quantized to 4 bits and dequantized."""
        return tuple(verdict for verdict in self.verdicts if verdict.dequantized)


def prove_merge(
    plan: Plan,
    sources: Sources,
    merged: Source,
    *,
    any_base: bool = False,
    tied: Mapping[str, str] | None = None,
) -> Proof:
    """Compare a merged model with the plan of its merge, by values and not bytes.

    Args:
        plan: plan of the merge, from `planned`, `plan_merge` or a merge's manifest.
        sources: inputs of the plan by name.
        merged: the merged model.
        any_base: accept both the original base and the one dequantized from 4 bits. False
            requires the one that the plan names.
        tied: keys that a checkpoint may hold or not -> keys that hold the same tensor.

    Raises:
        ArtifactError: a file cannot be read.
    """
    work = _Work(sources, merged, any_base, dict(tied or {}))
    units: list[Unit | Verdict] = [unit for op in plan.ops for unit in work.units(op)]
    units += work.tied_units(plan)
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        verdicts = tuple(pool.map(work.verdict, units))
    planned = {unit.key for unit in units if isinstance(unit, Unit)}
    extra = tuple(key for key in merged.tensors if key not in planned)
    total = sum((v.sums for v in verdicts if _counts(v) and v.sums), Sums())
    return Proof(verdicts, extra, *total.closest, total.kept_share)


def _counts(verdict: Verdict) -> bool:
    return (
        verdict.state is State.RIGHT
        and verdict.touched
        and not verdict.dequantized
        and "DoRA" not in verdict.note
    )


@dataclass(frozen=True)
class _Work:
    """The inputs of one proof."""

    sources: Sources
    merged: Source
    any_base: bool
    tied: Mapping[str, str]

    def units(self, op: Op) -> Iterator[Unit | Verdict]:
        """Split an operation into matrices to compare, or return its verdict at once."""
        key = op.name
        stored = self.merged.tensors.get(key)
        touched = _touched(op)
        if stored is None:
            if key not in self.tied:
                yield Verdict(key, State.MISSING, touched)
            return
        reason = comparable(op, self.sources)
        if reason:
            yield Verdict(key, State.NOT_COMPARED, touched, note=reason)
            return
        note, shape = "", tuple(stored.shape)
        if shape != op.shape:
            rows = _common_rows(op.shape, shape)
            if not rows or op.transpose or any(map(needs_all_rows, op.terms)):
                text = f"shape {list(shape)}, expected {list(op.shape)}"
                yield Verdict(key, State.NOT_COMPARED, touched, note=text)
                return
            note = f"{shape[0]} rows, {op.shape[0]} in the base: {rows} are compared"
            op = replace(op, shape=(rows, *op.shape[1:]))
        if len(op.shape) == 3 and not op.transpose and not (op.quantization or {}).get(STORED):
            yield from self._experts(op, key)
            return
        yield Unit(key, op, key, note=note)

    def _experts(self, op: Op, key: str) -> Iterator[Unit]:
        names = [term.a for term in op.terms if isinstance(term, LowRank)]
        rows = {name: info_of(name, self.sources).shape[0] for name in names}
        for index in range(op.shape[0]):
            expert = of_expert(op, index, rows)
            start = index * prod(op.shape[1:])
            yield Unit(f"{key}[{index}]", expert, key, start)

    def tied_units(self, plan: Plan) -> Iterator[Unit | Verdict]:
        """Yield tied tensors that are stored; they must equal the tensor that they are tied to."""
        ops = {op.name: op for op in plan.ops}
        for alias, holder in self.tied.items():
            if alias in self.merged.tensors and alias not in ops and holder in ops:
                yield from self.units(replace(ops[holder], name=alias))

    def verdict(self, unit: Unit | Verdict) -> Verdict:
        """Compare one unit, and diagnose it if it is wrong."""
        if isinstance(unit, Verdict):
            return unit
        try:
            return self._judged(unit)
        except ArtifactError as error:
            return Verdict(unit.name, State.NOT_COMPARED, _touched(unit.op), note=error.message)

    def _judged(self, unit: Unit) -> Verdict:
        touched = _touched(unit.op)
        if self.merged.tensors[unit.key].dtype not in NUMPY:
            if not touched and self._same_bytes(unit):
                return Verdict(unit.name, State.RIGHT, touched)
            dtype = self.merged.tensors[unit.key].dtype
            return Verdict(unit.name, State.NOT_COMPARED, touched, note=f"stored in {dtype}")
        sums = compare(unit, self.sources, self.merged)
        dora = any(isinstance(term, Dora) for term in unit.op.terms)
        state, scale, packed = State.RIGHT, 1.0, False
        if not sums.is_right(dora=dora):
            state, scale, packed = self._diagnosis(unit, sums)
        if state is State.RIGHT and not self.any_base and packed != _wants_4_bits(unit.op):
            state = State.BASE_MODE
        note = "; ".join(text for text in (unit.note, "DoRA" if dora else "") if text)
        return Verdict(unit.name, state, touched, scale, packed, sums, note)

    def _diagnosis(self, unit: Unit, sums: Sums) -> tuple[State, float, bool]:
        """Return what is wrong with a tensor, the factor on its change, and the base's kind."""
        if unit.op.terms and sums.same:
            return State.LEFT_OUT, 1.0, False
        guesses = [(1.0, True)] if unit.may_be_packed else []
        if unit.op.terms and abs(sums.kept_share - 1.0) > SCALE_MARGIN:
            guesses.append((sums.kept_share, False))
        for scale, packed in guesses:
            for _ in range(_STEPS if packed and unit.op.terms else 1):
                again = compare(unit, self.sources, self.merged, scale=scale, packed=packed)
                if again.explain(scale):
                    return _state_of(scale), scale, packed
                scale = again.kept_share
                scale = next((near for near in (0.0, 2.0) if abs(scale - near) <= _NEAR), scale)
        return State.LEFT_OUT if self._is_original(unit) else State.CHANGED, 1.0, False

    def _is_original(self, unit: Unit) -> bool:
        """Return True if the base's tensor is stored in place of the adapter's full copy."""
        info = self.sources[BASE].tensors.get(unit.op.name) if unit.op.input != BASE else None
        if info is None or tuple(info.shape) != unit.op.shape or unit.start:
            return False
        source = f"{BASE}:{unit.op.name}"
        op = Op(unit.op.name, unit.op.shape, info.dtype, source, info.dtype)
        same = not comparable(op, self.sources)
        return same and compare(replace(unit, op=op), self.sources, self.merged).is_right()

    def _same_bytes(self, unit: Unit) -> bool:
        op = unit.op
        if self.sources[op.input].tensors[op.key].dtype != self.merged.tensors[unit.key].dtype:
            return False
        base = Merged(Unit(op.key, op, op.key, op.start), self.sources[op.input])
        with base, Merged(unit, self.merged) as merged:
            rows = op.shape[0] if op.shape else 1
            step = max(1, _BLOCK // max(1, prod(op.shape[1:])))
            return all(
                np.array_equal(
                    base.raw(at, min(at + step, rows)), merged.raw(at, min(at + step, rows))
                )
                for at in range(0, rows, step)
            )


def _state_of(scale: float) -> State:
    if abs(scale - 1.0) <= SCALE_MARGIN:
        return State.RIGHT
    if abs(scale) <= _NEAR:
        return State.LEFT_OUT
    return State.TWICE if abs(scale - 2.0) <= _NEAR else State.SCALED


def _touched(op: Op) -> bool:
    return bool(op.terms) or op.input != BASE


def _wants_4_bits(op: Op) -> bool:
    quantization = op.quantization or {}
    return STORED not in quantization and quantization.get("base") == "dequantized"


def _common_rows(wanted: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number of rows that two embeddings share; 0 for other shapes."""
    if len(wanted) != 2 or len(shape) != 2 or wanted[1] != shape[1]:
        return 0
    return min(wanted[0], shape[0])
