"""Merged models, value by value, against base and adapter; and the merge of an adapter, planned.

`deliver` plans it in the same way. It is planned last, only if nothing else is wrong.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Collection, Iterator

import numpy as np

from tasks.audit.check import ERROR, INFO, WARNING, Fault, also, check
from tasks.audit.checks.adapter import adapter_keys, is_lora, pattern_of, plain_module
from tasks.audit.checks.adapter_base import fits_base
from tasks.audit.checks.values import has_values
from tasks.audit.class_contract import perform_apart
from tasks.audit.scan import differ, same_header
from tasks.audit.source import Source
from tasks.core.errors import PlumblineError
from tasks.weights.execute.worker import perform
from tasks.weights.expected import blocks, comparable
from tasks.weights.files.dtypes import rounded
from tasks.weights.files.names import EXPERT, PEFT_PREFIX
from tasks.weights.pairing import renamed_keys
from tasks.weights.proof import Planned, Proof, State, Verdict, planned, prove_merge

_FAULTS = {
    # State of a tensor, and what it means
    State.LEFT_OUT: "the base's values, although the adapter changes them",
    State.TWICE: "the adapter was added twice",
    State.SCALED: "a wrong scale",
    State.CHANGED: "neither the merge nor the base",
    State.MISSING: "missing",
}
_OTHER_BASE, _FEW = 0.5, 2
"""Share, and number, of untouched tensors that differ, above which the base is another one."""
_KEPT, _NAMED = 0.9, 3
"""Share of the adapter below which rounding is reported, and number of tensors that are named."""


def knows_adapter(source: Source) -> bool:
    """Return True if the adapter of the merge is known."""
    return source.adapter is not None and has_values(source)


def knows_base_only(source: Source) -> bool:
    """Return True if the values are compared with the base alone."""
    return source.adapter is None and has_values(source)


def _proof(source: Source) -> Proof | str:
    """Compare every element with base + scale * B A; returns the reason if that is impossible."""
    if source.base is None or source.adapter is None:
        return "no base, or no adapter"
    try:
        made = planned(source.base.folder.root, source.adapter, perform=perform_apart)
        return prove_merge(made.plan, made.sources, source.readable, tied=made.tied)
    except PlumblineError as error:
        return error.message


def _untouched(proof: Proof) -> tuple[list[Verdict], list[Verdict]]:
    """Return the tensors that the adapter does not touch, and those of them that differ."""
    untouched = [verdict for verdict in proof.verdicts if not verdict.touched]
    return untouched, [verdict for verdict in untouched if verdict.state is State.CHANGED]


@also("WRONG_BASE", needs=(knows_adapter,))
def merged_into_another(source: Source) -> Iterator[Fault]:
    """Most tensors that the adapter does not touch differ from the base's."""
    proof = source.once(_proof)
    untouched, changed = _untouched(proof) if isinstance(proof, Proof) else ([], [])
    if len(changed) > max(_FEW, _OTHER_BASE * len(untouched)):
        text = f"{len(changed)} of {len(untouched)} tensors that the adapter does not touch differ"
        yield Fault(text, "the base's, bit for bit", tensors=_names(changed))


@check(
    "MERGE_WRONG", ERROR, needs=(knows_adapter,),
    why="the model is not the trained one: it loads everywhere, and nothing fails",
    fix="merge again from the base: {again}",
)  # fmt: skip
def merge_wrong(source: Source) -> Iterator[Fault]:
    """Tensors that are not the base plus the adapter's change: one finding for each fault."""
    proof = source.once(_proof)
    if not isinstance(proof, Proof):
        return
    untouched, changed = _untouched(proof)
    for state, meaning in _FAULTS.items():
        wrong = [verdict for verdict in proof.of(state) if verdict not in changed]
        if wrong:
            scales = sorted({round(verdict.scale, 3) for verdict in wrong})
            rest = f", {scales[0]} to {scales[-1]} times" if state is State.SCALED else ""
            text = f"{meaning}{rest}: {len(wrong)} of {len(proof.verdicts)} tensors"
            yield Fault(text, "base + scale * B A", _file(source, wrong), _names(wrong))
    if changed:
        text = f"changed, and the adapter does not touch them: {len(changed)} of {len(untouched)}"
        yield Fault(f"{text} tensors", "the base's", _file(source, changed), _names(changed))
    if proof.drifts and not proof.faults:
        text = f"a wrong scale: {proof.scale:.4f} times the change, over all tensors"
        yield Fault(text, "the change once")


@check(
    "MERGE_BASE", WARNING, needs=(knows_adapter,),
    why="an adapter fits only one: the dequantised one if it was trained in 4 bits (QLoRA)",
    fix="nothing, if training loaded the base in 4 bits; else merge again: {again}",
)  # fmt: skip
def merge_base(source: Source) -> Iterator[Fault]:
    """Merged into the dequantised base, or partly into it and partly into the original."""
    proof = source.once(_proof)
    if not isinstance(proof, Proof):
        return
    packed = [verdict for verdict in proof.verdicts if verdict.dequantized and verdict.touched]
    right = [v for v in proof.verdicts if v.touched and v.state is State.RIGHT]
    plain = [v for v in right if not v.dequantized and v.name.endswith("_proj.weight")]
    if packed and plain:
        text = f"{len(packed)} dequantised, {len(plain)} original"
        yield Fault(text, "one base for all", tensors=_names(plain))
    elif packed:
        text = f"{len(packed)} tensors: the base's, quantised to NF4 and back, plus the change"
        yield Fault(text, "a QLoRA adapter", severity=INFO)


@check(
    "MERGE_NOT_PROVEN", WARNING, needs=(knows_adapter,),
    why="these tensors may be wrong",
    fix="pass model and base in bf16, fp16 or fp32, and the adapter as PEFT saved it",
)  # fmt: skip
def merge_not_proven(source: Source) -> Iterator[Fault]:
    """Tensors that could not be compared with base and adapter."""
    proof = source.once(_proof)
    if isinstance(proof, str):
        yield Fault(proof, "a base and an adapter that fit each other")
    elif left := proof.of(State.NOT_COMPARED):
        text, file = f"{len(left)} tensors: {left[0].note}", _file(source, left)
        yield Fault(text, "tensors that can be compared", file, _names(left))


@check(
    "MERGE_ROUNDED", WARNING, needs=(knows_adapter,),
    why="rounding to nearest drops changes below half a step of the format, as peft does",
    fix="merge with Plumbline, which rounds without bias: {again}",
)  # fmt: skip
def merge_rounded(source: Source) -> Iterator[Fault]:
    """Rounding threw away part of what the adapter learned."""
    proof = source.once(_proof)
    if isinstance(proof, Proof) and _is_right(proof) and proof.kept < _KEPT:
        worst = sorted(
            (verdict for verdict in proof.verdicts if verdict.touched and verdict.sums),
            key=lambda verdict: verdict.sums.kept_share if verdict.sums else 1.0,
        )
        text = f"{proof.kept:.0%} of what the adapter learned is in these weights"
        yield Fault(text, "all of it", tensors=_names(worst[:_NAMED]))


def _is_right(proof: Proof) -> bool:
    return proof.ok and not proof.of(State.NOT_COMPARED)


@check(
    "MERGE_PROVEN", INFO, needs=(knows_adapter,),
    why="every element was compared; differences are within the rounding of the dtypes",
    fix="nothing",
)  # fmt: skip
def merge_proven(source: Source) -> Iterator[Fault]:
    """Every tensor is base + scale * B A, or the base's."""
    proof = source.once(_proof)
    if isinstance(proof, Proof) and _is_right(proof) and proof.kept >= _KEPT:
        touched = sum(verdict.touched for verdict in proof.verdicts)
        text = f"{touched} tensors are the base's plus the adapter's"
        yield Fault(f"{text}, {len(proof.verdicts) - touched} the base's", "exactly that")


def _names(verdicts: Collection[Verdict]) -> list[str]:
    return [verdict.name for verdict in verdicts]


def _file(source: Source, verdicts: Collection[Verdict]) -> str:
    name = next(iter(verdicts)).name.partition("[")[0]
    return source.tensors[name].file if name in source.tensors else ""


def _changes(source: Source) -> dict[str, dict[bool, list[str]]]:
    """Sort the matrices of layers by kind, and by whether they differ from the base's."""
    kinds: dict[str, dict[bool, list[str]]] = defaultdict(lambda: defaultdict(list))
    base = source.base
    for key, tensor in source.tensors.items():
        kind = pattern_of(key)
        if base is None or len(tensor.shape) != 2 or kind == key:
            continue
        if same_header(key, source, base):
            kinds[kind][differ((source, key), (base, key))].append(key)
    return kinds


@check(
    "MERGE_PARTIAL", WARNING, needs=(knows_base_only,),
    why="a merge that stopped halfway looks like this; so does training of some layers",
    fix="pass the adapter to check every tensor: {prove}",
)  # fmt: skip
def merge_partial(source: Source) -> Iterator[Fault]:
    """Some layers equal the base's bit for bit, and others of the same kind do not."""
    mixed = [each for each in source.once(_changes).values() if each[True] and each[False]]
    same = [key for each in mixed for key in each[False]]
    if same:
        total = sum(len(each[True]) + len(each[False]) for each in mixed)
        text = f"{len(same)} of {total} tensors are the base's"
        yield Fault(text, "all changed, or none", tensors=same)


_ABSENT = "No module named"
"""Part of the child's error where torch or transformers is not installed."""


def may_plan(source: Source) -> bool:
    """Return True for a LoRA adapter with its base if nothing else is wrong with it."""
    sound = ERROR not in source.codes.values()
    return source.planned and source.has_base and is_lora(source) and sound


def _plan(source: Source) -> Planned | PlumblineError:
    """Plan the merge, here where transformers is loaded anyway, else in a child process."""
    if source.base is None:
        raise LookupError("no base")
    run = perform if "transformers" in sys.modules else perform_apart
    try:
        return planned(source.base.folder.root, source.folder.root, perform=run)
    except PlumblineError as error:
        return error


@check(
    "ADAPTER_NO_MERGE", ERROR, needs=(may_plan,),
    why="`deliver` refuses it from the same headers; peft stops, or drops tensors",
    fix="pass the base that adapter_config.json names, or save the adapter again",
    issues="Automodel #3233",
)  # fmt: skip
def no_merge(source: Source) -> Iterator[Fault]:
    """An adapter that cannot be merged into this base."""
    plan = source.once(_plan)
    if isinstance(plan, PlumblineError) and _ABSENT not in plan.message:
        texts = [str(text) for text in plan.details[:3]] or [plan.message]
        yield Fault("; ".join(texts), "an adapter of this base")


@also("ADAPTER_MODULES", needs=(may_plan,))
def live_names(source: Source) -> Iterator[Fault]:
    """Names of older versions of transformers: a merge knows them, peft does not."""
    plan, keys = source.once(_plan), source.once(adapter_keys)
    live = None if isinstance(plan, PlumblineError) else plan.live
    if live is None:
        return
    # peft converts the names of separate experts itself.
    names = [plain_module(name) for name in keys.pairs if not EXPERT.search(name)]
    renamed = renamed_keys(live)
    moved = [n for n in names if n not in live.modules and f"{n}.weight" in renamed]
    if moved:
        expected = f"{PEFT_PREFIX}{renamed[f'{moved[0]}.weight'].removesuffix('.weight')}"
        text = f"{PEFT_PREFIX}{moved[0]}, a name of transformers 4"
        yield Fault(text, expected, keys.pairs[moved[0]].file, moved)


@check(
    "ADAPTER_ROUNDS_AWAY", INFO, needs=(fits_base,),
    why="rounding to nearest drops changes below half a step of the format, as peft does",
    fix="merge it with Plumbline, which rounds without bias: {merge}",
)  # fmt: skip
def rounds_away(source: Source) -> Iterator[Fault]:
    """Merging this adapter with rounding to nearest loses part of it (with values=true)."""
    if not source.values:
        return
    update, kept = 0.0, {"BF16": 0.0, "F16": 0.0}
    try:
        made = source.once(_plan)
        if isinstance(made, PlumblineError):
            return  # adapter and base do not fit, which is a finding of other checks
        for op in made.plan.ops:
            if not op.terms or comparable(op, made.sources):
                continue
            for block in blocks(op, made.sources, sampled=True):
                update += float(np.vdot(block.change, block.change))
                for dtype in kept:
                    gained = rounded(block.base + block.change, dtype) - block.base
                    kept[dtype] += float(np.vdot(gained, block.change))
    except PlumblineError:
        return  # weights that cannot be read
    if update and kept["BF16"] < _KEPT * update:
        yield Fault(
            f"rounding the merged weights to nearest keeps {kept['BF16'] / update:.0%} of the "
            f"update in bfloat16, {kept['F16'] / update:.0%} in float16",
            "all of it",
        )
