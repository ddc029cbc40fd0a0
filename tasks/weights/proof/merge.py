"""Check every tensor of a merge.

proof = prove_merge(plan, {"base": base, "adapter": adapter}, merged)
proof.ok                      every tensor is what the plan says, up to rounding
proof.counts                  {State.RIGHT: 288, State.LEFT_OUT: 2}
proof.faults[0].name          and .state, .scale, .like
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tasks.core.errors import ArtifactError
from tasks.weights.files.dtype_conversion import NUMPY
from tasks.weights.files.names import EXPERT
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
from tasks.weights.proof.faults import Fault, State, diagnose
from tasks.weights.quantized.packed import STORED

_THREADS = 4
_BLOCK = 1 << 20
BASE = "base"
"""Name of the base among the inputs of a plan."""


@dataclass(frozen=True)
class Verdict:
    """Result of the check of one tensor of the merged model.

    Attributes:
        name: key in the merged model; with `[3]` behind it for expert 3 of a stack.
        state: right, or the kind of its fault.
        touched: the adapter changes it.
        scale: factor by which the change was added, if that is the fault.
        like: the other expert whose tensor it is.
        dequantized: True if its base was quantized to 4 bits and dequantized.
        sums: counts of the comparison; None if there was none.
        note: reason why it was not compared, or a difference that is not wrong.
    """

    name: str
    state: State
    touched: bool
    scale: float = 1.0
    like: str = ""
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
    groups: dict[str, list[Unit]] = {}
    for unit in units:
        if isinstance(unit, Unit) and unit.group:
            groups.setdefault(unit.group, []).append(unit)
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        verdicts = tuple(pool.map(lambda unit: work.verdict(unit, groups), units))
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
        group = EXPERT.sub("*", key) if EXPERT.search(key) else ""
        yield Unit(key, op, key, group=group, note=note)

    def _experts(self, op: Op, key: str) -> Iterator[Unit]:
        names = [term.a for term in op.terms if isinstance(term, LowRank)]
        rows = {name: info_of(name, self.sources).shape[0] for name in names}
        for index in range(op.shape[0]):
            expert = of_expert(op, index, rows)
            start = index * prod(op.shape[1:])
            yield Unit(f"{key}[{index}]", expert, key, start, group=key)

    def tied_units(self, plan: Plan) -> Iterator[Unit | Verdict]:
        """Yield tied tensors that are stored; they must equal the tensor that they are tied to."""
        ops = {op.name: op for op in plan.ops}
        for alias, holder in self.tied.items():
            if alias in self.merged.tensors and alias not in ops and holder in ops:
                yield from self.units(replace(ops[holder], name=alias))

    def verdict(self, unit: Unit | Verdict, groups: Mapping[str, Sequence[Unit]]) -> Verdict:
        """Compare one unit, and diagnose it if it is wrong."""
        if isinstance(unit, Verdict):
            return unit
        try:
            return self._judged(unit, groups)
        except ArtifactError as error:
            return Verdict(unit.name, State.NOT_COMPARED, _touched(unit.op), note=error.message)

    def _judged(self, unit: Unit, groups: Mapping[str, Sequence[Unit]]) -> Verdict:
        touched = _touched(unit.op)
        if self.merged.tensors[unit.key].dtype not in NUMPY:
            if not touched and self._same_bytes(unit):
                return Verdict(unit.name, State.RIGHT, touched)
            dtype = self.merged.tensors[unit.key].dtype
            return Verdict(unit.name, State.NOT_COMPARED, touched, note=f"stored in {dtype}")
        sums = compare(unit, self.sources, self.merged)
        dora = any(isinstance(term, Dora) for term in unit.op.terms)
        fault = Fault(State.RIGHT)
        if not sums.is_right(dora=dora):
            siblings = [u for u in groups.get(unit.group, ()) if u.name != unit.name]
            fault = diagnose(unit, sums, self.sources, self.merged, siblings)
            if fault.state is State.CHANGED and self._is_original(unit):
                fault = Fault(State.LEFT_OUT)
        state = fault.state
        if (
            state is State.RIGHT
            and not self.any_base
            and fault.dequantized != _wants_4_bits(unit.op)
        ):
            state = State.BASE_MODE
        note = "; ".join(text for text in (unit.note, "DoRA" if dora else "") if text)
        return Verdict(
            unit.name, state, touched, fault.scale, fault.like, fault.dequantized, sums, note
        )

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
