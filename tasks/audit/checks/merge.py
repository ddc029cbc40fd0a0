"""Merged models, value by value, against base and adapter; and the merge of an adapter, planned.

`deliver` plans it in the same way. It is planned last, only if nothing else is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tasks.audit.check import ERROR, INFO, WARNING, Fault, check
from tasks.audit.checks.adapter import adapter_keys, is_lora, plain_module
from tasks.audit.checks.values import has_values
from tasks.audit.class_contract import perform_apart
from tasks.audit.source import Source
from tasks.core.errors import PlumblineError
from tasks.weights.files.names import EXPERT, PEFT_PREFIX

if TYPE_CHECKING:  # arithmetic that most audits do not need
    from tasks.weights.plan import Planned
    from tasks.weights.proof import Proof, Verdict

_OTHER_BASE, _FEW = 0.5, 2
"""Share, and number, of untouched tensors that differ, above which the base is another one."""
_KEPT, _NAMED = 0.9, 3
"""Share of the adapter below which rounding is reported, and number of tensors that are named."""


def knows_adapter(source: Source) -> bool:
    """Return True if the adapter of the merge is known."""
    return source.adapter is not None and has_values(source)


def _proof(source: Source) -> Proof | str:
    """Compare every element with base + scale * B A; returns the reason if that is impossible."""
    from tasks.weights.proof import planned, prove_merge

    assert source.adapter is not None
    try:
        made = planned(source.known_base.root, source.adapter, perform=perform_apart)
        return prove_merge(made.plan, made.sources, source.tensors, tied=made.tied)
    except PlumblineError as error:
        return error.message


def is_proven(source: Source) -> bool:
    """Return True if a merge was compared with base and adapter."""
    return knows_adapter(source) and not isinstance(source.once(_proof), str)


def _compared(source: Source) -> Proof:
    proof = source.once(_proof)
    assert not isinstance(proof, str)
    return proof


@check(
    "MERGE_WRONG", ERROR, needs=(is_proven,),
    why="the model is not the trained one: it loads everywhere, and nothing fails",
    fix="merge again from the base: {again}",
)  # fmt: skip
def merge_wrong(source: Source) -> Iterator[Fault]:
    """Tensors that are not the base plus the adapter's change; a warning for two bases in one."""
    from tasks.weights.proof import State

    proof = _compared(source)
    untouched = [verdict for verdict in proof.verdicts if not verdict.touched]
    count, changed = len(untouched), [v for v in untouched if v.state is State.WRONG]
    if len(changed) > max(_FEW, _OTHER_BASE * count):
        text = f"{len(changed)} of {count} tensors that the adapter does not touch differ"
        yield Fault(text, "the base's, bit for bit", tensors=_names(changed), code="WRONG_BASE")
        return
    for state in (State.WRONG, State.MISSING):
        if wrong := [verdict for verdict in proof.of(state) if verdict not in changed]:
            times = sorted(each.sums.kept_share for each in wrong if each.sums is not None)
            span = " to ".join(dict.fromkeys(f"{each:.3g}" for each in times[:1] + times[-1:]))
            rest = f", with {span} times the change" if span else ""
            text = f"{state}{rest}: {len(wrong)} of {len(proof.verdicts)} tensors"
            yield Fault(text, "base + scale * B A", _file(source, wrong), _names(wrong))
    if changed:
        text = f"changed, and the adapter does not touch them: {len(changed)} of {count} tensors"
        yield Fault(text, "the base's", _file(source, changed), _names(changed))
    if proof.drifts and not proof.faults:
        text = f"a wrong scale: {proof.scale:.4f} times the change, over all tensors"
        yield Fault(text, "the change once")
    packed = [verdict for verdict in proof.verdicts if verdict.dequantized and verdict.touched]
    right = [v for v in proof.of(State.RIGHT) if v.touched and not v.dequantized]
    plain = [verdict for verdict in right if verdict.name.endswith("_proj.weight")]
    if packed:
        why = "an adapter fits one base: the dequantised one if it was trained in 4 bits (QLoRA)"
        text = f"{len(packed)} into the base quantised to NF4 and back, {len(plain)} not"
        severity = WARNING if plain else INFO
        yield Fault(text, "one base for all", "", _names(plain), severity, why)


@check(
    "MERGE_NOT_PROVEN", WARNING, needs=(knows_adapter,),
    why="these tensors may be wrong",
    fix="pass model and base in bf16, fp16 or fp32, and the adapter as PEFT saved it",
)  # fmt: skip
def merge_not_proven(source: Source) -> Iterator[Fault]:
    """Tensors that could not be compared with base and adapter."""
    from tasks.weights.proof import State

    proof = source.once(_proof)
    if isinstance(proof, str):
        yield Fault(proof, "a base and an adapter that fit each other")
    elif left := proof.of(State.NOT_COMPARED):
        text, file = f"{len(left)} tensors: {left[0].note}", _file(source, left)
        yield Fault(text, "tensors that can be compared", file, _names(left))


@check(
    "MERGE_ROUNDED", WARNING, needs=(is_proven,),
    why="rounding to nearest drops changes below half a step of the format, as peft does",
    fix="merge with Plumbline, which rounds without bias: {again}",
)  # fmt: skip
def merge_rounded(source: Source) -> Iterator[Fault]:
    """Rounding threw away part of what the adapter learned."""
    proof = _compared(source)
    if proof.ok and proof.kept < _KEPT:
        touched = (each for each in proof.verdicts if each.touched and each.sums is not None)
        worst = sorted(touched, key=lambda each: each.sums.kept_share if each.sums else 1.0)
        text = f"{proof.kept:.0%} of what the adapter learned is in these weights"
        yield Fault(text, "all of it", tensors=_names(worst[:_NAMED]))


@check(
    "MERGE_PROVEN", INFO, needs=(is_proven,),
    why="every element was compared; differences are within the rounding of the dtypes",
    fix="nothing",
)  # fmt: skip
def merge_proven(source: Source) -> Iterator[Fault]:
    """Every tensor is base + scale * B A, or the base's."""
    proof = _compared(source)
    if proof.ok and proof.kept >= _KEPT:
        touched = sum(verdict.touched for verdict in proof.verdicts)
        text = f"{touched} tensors are the base's plus the adapter's"
        yield Fault(f"{text}, {len(proof.verdicts) - touched} the base's", "exactly that")


def _names(verdicts: Sequence[Verdict]) -> list[str]:
    return [verdict.name for verdict in verdicts]


def _file(source: Source, verdicts: Sequence[Verdict]) -> str:
    return source.weights.file_of.get(verdicts[0].name.partition("[")[0], "")


def may_plan(source: Source) -> bool:
    """Return True for a LoRA adapter with its base if nothing else is wrong with it."""
    sound = ERROR not in source.codes.values()
    return source.planned and source.has_base and is_lora(source) and sound


def _plan(source: Source) -> Planned | PlumblineError:
    """Plan the merge, here where transformers is loaded anyway, else in a child process."""
    from tasks.weights.model import perform
    from tasks.weights.proof import planned

    run = perform if "transformers" in sys.modules else perform_apart
    try:
        return planned(source.known_base.root, source.root, perform=run)
    except PlumblineError as error:
        return error


@check(
    "ADAPTER_NO_MERGE", ERROR, needs=(may_plan,),
    why="it was trained on another base, or saved in part: peft stops, or only warns and leaves "
    "modules as they are; `deliver` refuses it",
    fix="pass the base that adapter_config.json names, or save the adapter again",
    issues="LLaMA-Factory #4913, LLaMA-Factory #3125, LLaMA-Factory #5262, Automodel #3233",
)  # fmt: skip
def no_merge(source: Source) -> Iterator[Fault]:
    """An adapter that cannot be merged into this base: names, shapes or modules that do not fit."""
    plan = source.once(_plan)
    if isinstance(plan, PlumblineError) and "No module named" in plan.message:
        why = "without transformers only adapters of common families are compared with their base"
        fix = "audit it where transformers is installed"
        yield Fault(plan.message, "transformers", "", (), WARNING, why, fix)
    elif isinstance(plan, PlumblineError):
        texts = [str(text) for text in plan.details[:3]] or [plan.message]
        yield Fault("; ".join(texts), "an adapter of this base")


@check(
    "ADAPTER_MODULES", ERROR, needs=(may_plan,),
    why="a merge knows these names; peft only warns, and the model answers as the base",
    fix="merge it: {merge}; or save the adapter with the current peft and transformers",
    issues="LLaMA-Factory #4913",
)  # fmt: skip
def live_names(source: Source) -> Iterator[Fault]:
    """Names of modules in older versions of transformers."""
    from tasks.weights.lora import renamed_keys

    plan, pairs = source.once(_plan), source.once(adapter_keys).pairs
    if isinstance(plan, PlumblineError):
        return
    # peft converts the names of separate experts itself.
    names = [plain_module(name) for name in pairs if not EXPERT.search(name)]
    renamed = renamed_keys(plan.facts)
    moved = [n for n in names if n not in plan.facts.modules and f"{n}.weight" in renamed]
    if moved:
        expected = f"{PEFT_PREFIX}{renamed[f'{moved[0]}.weight'].removesuffix('.weight')}"
        text = f"{PEFT_PREFIX}{moved[0]}, a name of transformers 4"
        yield Fault(text, expected, tensors=moved)


@check(
    "ADAPTER_ROUNDS_AWAY", INFO, needs=(may_plan,),
    why="rounding to nearest drops changes below half a step of the format, as peft does",
    fix="merge it with Plumbline, which rounds without bias: {merge}",
)  # fmt: skip
def rounds_away(source: Source) -> Iterator[Fault]:
    """Merging this adapter with rounding to nearest loses part of it (with values=true)."""
    from tasks.weights.expected import blocks, comparable
    from tasks.weights.files.dtypes import rounded

    made = source.once(_plan) if source.values else None
    if made is None or isinstance(made, PlumblineError):
        return
    update, kept = 0.0, {"BF16": 0.0, "F16": 0.0}
    try:
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
