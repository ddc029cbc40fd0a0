"""Prove a merge from the files alone: tensors are `base + scale * B A`, up to rounding.

    plan = planned(base, adapter)                            # of the merge of two folders
    proof = prove_merge(plan.plan, plan.sources, merged)     # all rows of a merge by any tool
    proof.ok, proof.faults[0].name, proof.faults[0].state
    results = recompute(plan, sources, merged)               # sampled rows of a merge of ours

Model outputs cannot show a small fault: after five steps an adapter hardly changes a
log-probability, and a module that was left out changes none. So values are read back and recomputed
without the code that merges.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from pathlib import Path

import numpy as np

from tasks.core.contract import Check
from tasks.core.errors import ArtifactError
from tasks.weights.execute.worker import Perform, perform
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import NUMPY
from tasks.weights.files.source import Source, info_of
from tasks.weights.head_plans import merged_reward
from tasks.weights.heads import detect, read_folder
from tasks.weights.lora import changes, read_adapter
from tasks.weights.merge import MergeSettings, plan_merge
from tasks.weights.model import Model, model_facts
from tasks.weights.plan import Dora, LowRank, Op, Plan, needs_all_rows
from tasks.weights.proof.compare import (
    SCALE_MARGIN,
    SIGMAS,
    Merged,
    Sums,
    compare,
    may_be_packed,
    wrong_rows,
)
from tasks.weights.proof.expected import Sources, comparable, of_expert
from tasks.weights.quantized.source import decoding, open_model

_THREADS = 4
_NEAR, _STEPS = 0.03, 3
"""Factors this near to 0 or 2 are those, and passes to estimate one on a 4-bit base, whose block
scales absorb part of the change."""
BASE = "base"
"""Name of the base among the inputs of a plan."""
_HINT = "merge again: force=[merge]; if it fails again, suspect the disk or the memory"


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
    disk = {key: tuple(info.shape) for key, info in model.tensors.items()}
    facts = perform(model_facts, base, "bfloat16", disk)
    infos = {f"{read.name}:{key}": info for key, info in read.tensors.tensors.items()}
    plan = plan_merge(model.tensors, facts, changes([(read, 1.0)], facts), infos)
    sources = {BASE: model, read.name: read.tensors}
    tied = {key: to for key, to in facts.tied.items() if key not in plan.untied}
    return Planned(decoding(plan, sources), sources, tied, facts)


@dataclass(frozen=True)
class Recomputed:
    """Result of the recomputation of one tensor."""

    name: str
    elements: int = 0
    wrong: int = 0  # elements that differ from base plus adapter by more than rounding
    skipped: str = ""  # reason why it was not recomputed


def recompute(plan: Plan, sources: Sources, merged: Source) -> list[Recomputed]:
    """Recompute sampled rows of every tensor of a merge of ours, in fp64."""
    results = []
    for op in plan.ops:
        reason = comparable(op, sources)
        if not reason and op.dtype not in NUMPY:
            reason = f"written as {op.dtype}"
        counts = (0, 0) if reason else wrong_rows(op, sources, merged)
        results.append(Recomputed(op.name, *counts, reason))
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


class State(StrEnum):
    """Result of the comparison of one tensor."""

    RIGHT = "right"
    LEFT_OUT = "left out"
    TWICE = "merged twice"
    SCALED = "scaled wrongly"
    CHANGED = "changed otherwise"
    MISSING = "not there"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison of one tensor of the merged model."""

    name: str  # key in the merged model; with `[3]` behind it for expert 3 of a stack
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
    scale: float = 1.0  # factor on the change, estimated over all right tensors
    noise: float = 0.0  # its standard deviation
    kept: float = 1.0  # share of the exact change that the right tensors have after rounding

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

    @property
    def dequantized(self) -> tuple[Verdict, ...]:
        """Verdicts of tensors whose base was quantized to 4 bits and dequantized."""
        return tuple(verdict for verdict in self.verdicts if verdict.dequantized)


def prove_merge(
    plan: Plan, sources: Sources, merged: Source, *, tied: Mapping[str, str] | None = None
) -> Proof:
    """Compare a merged model with the plan of its merge, by values and not bytes.

    Accepts the base as stored, and quantised to 4 bits and dequantised.

    Args:
        plan: plan of the merge, from `planned`, `plan_merge` or a merge's manifest.
        sources: inputs of the plan by name.

    Raises:
        ArtifactError: a file cannot be read.
    """
    work = _Work(sources, merged, dict(tied or {}))
    units: list[_Unit | Verdict] = [unit for op in plan.ops for unit in work.units(op)]
    units += work.tied_units(plan)
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        verdicts = tuple(pool.map(work.verdict, units))
    total = sum((v.sums for v in verdicts if v.sums and _tells_scale(v)), Sums())
    return Proof(verdicts, *total.closest, total.kept_share)


def _tells_scale(verdict: Verdict) -> bool:
    right = verdict.state is State.RIGHT and verdict.touched
    return right and not verdict.dequantized and "DoRA" not in verdict.note


@dataclass(frozen=True)
class _Unit:
    """A tensor of the merged model, or one matrix of a stack, and the operation that defines it."""

    name: str
    op: Op
    key: str
    start: int = 0  # first element within the tensor `key`
    note: str = ""  # a difference that is not wrong: rows that were added

    @property
    def touched(self) -> bool:
        """True if the adapter changes or replaces it."""
        return bool(self.op.terms) or self.op.input != BASE


@dataclass(frozen=True)
class _Work:
    """The inputs of one proof."""

    sources: Sources
    merged: Source
    tied: Mapping[str, str]

    def units(self, op: Op) -> Iterator[_Unit | Verdict]:
        """Split an operation into matrices to compare, or return its verdict at once."""
        key = op.name
        touched = _Unit(key, op, key).touched
        stored = self.merged.tensors.get(key)
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
        if len(op.shape) == 3 and not op.transpose and op.packed is None:
            yield from self._experts(op, key)
            return
        yield _Unit(key, op, key, note=note)

    def _experts(self, op: Op, key: str) -> Iterator[_Unit]:
        names = [term.a for term in op.terms if isinstance(term, LowRank)]
        rows = {name: info_of(name, self.sources).shape[0] for name in names}
        for index in range(op.shape[0]):
            start = index * prod(op.shape[1:])
            yield _Unit(f"{key}[{index}]", of_expert(op, index, rows), key, start)

    def tied_units(self, plan: Plan) -> Iterator[_Unit | Verdict]:
        """Yield tied tensors that are stored; they must equal the tensor that they are tied to."""
        ops = {op.name: op for op in plan.ops}
        for alias, holder in self.tied.items():
            if alias in self.merged.tensors and alias not in ops and holder in ops:
                yield from self.units(replace(ops[holder], name=alias))

    def verdict(self, unit: _Unit | Verdict) -> Verdict:
        """Compare one unit, and diagnose it if it is wrong."""
        if isinstance(unit, Verdict):
            return unit
        try:
            return self._judged(unit)
        except ArtifactError as error:
            return Verdict(unit.name, State.NOT_COMPARED, unit.touched, note=error.message)

    def _judged(self, unit: _Unit) -> Verdict:
        dtype = self.merged.tensors[unit.key].dtype
        if dtype not in NUMPY:
            if not unit.touched and self._same_bytes(unit):
                return Verdict(unit.name, State.RIGHT, touched=False)
            note = f"stored in {dtype}"
            return Verdict(unit.name, State.NOT_COMPARED, unit.touched, note=note)
        sums = self._compared(unit)
        dora = any(isinstance(term, Dora) for term in unit.op.terms)
        state, scale, packed = State.RIGHT, 1.0, False
        if not sums.is_right(dora=dora):
            state, scale, packed = self._diagnosis(unit, sums)
        note = "; ".join(text for text in (unit.note, "DoRA" if dora else "") if text)
        return Verdict(unit.name, state, unit.touched, scale, packed, sums, note)

    def _compared(self, unit: _Unit, *, scale: float = 1.0, packed: bool = False) -> Sums:
        with Merged(self.merged, unit.key, unit.op.shape, unit.start) as values:
            return compare(unit.op, self.sources, values, scale=scale, packed=packed)

    def _diagnosis(self, unit: _Unit, sums: Sums) -> tuple[State, float, bool]:
        """Return what is wrong with a tensor, the factor on its change, and if it is 4-bit."""
        if unit.op.terms and sums.same:
            return State.LEFT_OUT, 1.0, False
        guesses = [(1.0, True)] if may_be_packed(unit.op) else []
        if unit.op.terms and abs(sums.kept_share - 1.0) > SCALE_MARGIN:
            guesses.append((sums.kept_share, False))
        for scale, packed in guesses:
            for _ in range(_STEPS if packed and unit.op.terms else 1):
                again = self._compared(unit, scale=scale, packed=packed)
                if again.explain(scale):
                    return _state_of(scale), scale, packed
                scale = again.kept_share
                scale = next((near for near in (0.0, 2.0) if abs(scale - near) <= _NEAR), scale)
        return State.LEFT_OUT if self._is_original(unit) else State.CHANGED, 1.0, False

    def _is_original(self, unit: _Unit) -> bool:
        """Return True if the base's tensor is stored in place of the adapter's full copy."""
        info = self.sources[BASE].tensors.get(unit.op.name) if unit.op.input != BASE else None
        if info is None or tuple(info.shape) != unit.op.shape or unit.start:
            return False
        source = f"{BASE}:{unit.op.name}"
        op = Op(unit.op.name, unit.op.shape, info.dtype, source, info.dtype)
        return not comparable(op, self.sources) and self._compared(replace(unit, op=op)).is_right()

    def _same_bytes(self, unit: _Unit) -> bool:
        op = unit.op
        with (
            Merged(self.sources[op.input], op.key, op.shape, op.start) as base,
            Merged(self.merged, unit.key, op.shape, unit.start) as merged,
        ):
            return base.dtype == merged.dtype and np.array_equal(base.raw(), merged.raw())


def _state_of(scale: float) -> State:
    if abs(scale - 1.0) <= SCALE_MARGIN:
        return State.RIGHT
    if abs(scale) <= _NEAR:
        return State.LEFT_OUT
    return State.TWICE if abs(scale - 2.0) <= _NEAR else State.SCALED


def _common_rows(wanted: Sequence[int], shape: Sequence[int]) -> int:
    """Return the number of rows that two embeddings share; 0 for other shapes."""
    if len(wanted) != 2 or len(shape) != 2 or wanted[1] != shape[1]:
        return 0
    return min(wanted[0], shape[0])
