"""The merge of an adapter into its base, planned as `deliver` does when nothing else is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from tasks.audit.check import ERROR, INFO, Fault, also, check
from tasks.audit.checks.adapter import adapter_keys, is_lora, plain_module
from tasks.audit.checks.adapter_base import fits_base
from tasks.audit.class_contract import perform_apart
from tasks.audit.source import Source
from tasks.core.errors import PlumblineError
from tasks.weights.adapters.legacy_names import in_memory
from tasks.weights.execute.worker import perform
from tasks.weights.files.dtype_conversion import rounded
from tasks.weights.files.names import EXPERT, PEFT_PREFIX
from tasks.weights.proof.compare import comparable
from tasks.weights.proof.expected import Expected
from tasks.weights.proof.planning import Planned, planned

_KEPT = 0.9
"""Share below which a merge to nearest is reported."""
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
    why="`deliver` plans the merge from the same headers and refuses it; peft fails with 'size "
    "mismatch', or drops tensors with a warning",
    fix="pass the base that adapter_config.json names, or save the adapter again from the training "
    "run",
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
    now = {n: in_memory(live, f"{n}.weight") for n in names if n not in live.modules}
    moved = [name for name, new in now.items() if new != f"{name}.weight"]
    if moved:
        expected = f"{PEFT_PREFIX}{now[moved[0]].removesuffix('.weight')}"
        text = f"{PEFT_PREFIX}{moved[0]}, a name of transformers 4"
        yield Fault(text, expected, keys.pairs[moved[0]].file, moved)


@check(
    "ADAPTER_ROUNDS_AWAY", INFO, needs=(fits_base,),
    why="peft and all tools that cast the sum round to nearest: changes below half a step of the "
    "format vanish, and the merged model is closer to the base than the trained one",
    fix="merge it with Plumbline, which rounds without bias, {merge}, or serve it beside its base; "
    "with other tools save the merged model in float32",
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
            expected = Expected(op, made.sources)
            for first, end in expected.sampled_rows():
                block = expected.block(first, end)
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
