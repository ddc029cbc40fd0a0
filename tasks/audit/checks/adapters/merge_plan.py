"""Plan the merge of an adapter into its base, as `deliver` does: what it refuses is an error."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.audit.catalogue.adapters import Adapters
from tasks.audit.checks.adapters.adapter_keys import plain_module, sort_keys
from tasks.audit.class_contract import perform_apart
from tasks.audit.finding import Finding
from tasks.audit.recognise import ADAPTER_CONFIG
from tasks.audit.source import Source
from tasks.core.errors import PlumblineError
from tasks.weights.adapters.legacy_names import in_memory
from tasks.weights.execute.worker import perform
from tasks.weights.files.names import EXPERT, PEFT_PREFIX
from tasks.weights.proof.planning import Planned, planned

_SHOWN = 3
_ABSENT = "No module named"
"""Part of the child's error where torch or transformers is not installed."""


def check(source: Source) -> Iterator[Finding]:
    """Report what keeps a plan from being made, and names that peft does not find."""
    base = source.base
    if not source.is_adapter or base is None or not base.is_model:
        return
    if source.config(ADAPTER_CONFIG).get("peft_type") != "LORA":
        return
    try:
        plan = planned(base.folder.root, source.folder.root, perform=_perform)
    except PlumblineError as error:
        if _ABSENT not in error.message:
            texts = [str(text) for text in error.details[:_SHOWN]] or [error.message]
            yield Adapters.ADAPTER_NO_MERGE.at(
                "", found="; ".join(texts), expected="an adapter of this base"
            )
        return
    yield from _live_names(source, plan)


def _perform(request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Build the class here where transformers is loaded anyway, else in a child process."""
    return perform(request) if "transformers" in sys.modules else perform_apart(request)


def _live_names(source: Source, plan: Planned) -> Iterator[Finding]:
    """Report names of older versions of transformers: a merge knows them, peft does not.

    peft converts the names of separate experts itself.
    """
    live = plan.live
    keys = sort_keys(source.tensors)
    names = [plain_module(name) for name in keys.pairs if not EXPERT.search(name)]
    gone = [name for name in names if live is not None and name not in live.modules]
    now = {name: in_memory(live, f"{name}.weight") for name in gone} if live is not None else {}
    moved = [name for name in gone if now[name] != f"{name}.weight"]
    if moved:
        yield Adapters.ADAPTER_MODULE_NAMES.at(
            keys.pairs[moved[0]].file, moved,
            found=f"{PEFT_PREFIX}{moved[0]}, a name of transformers 4",
            expected=f"{PEFT_PREFIX}{now[moved[0]].removesuffix('.weight')}",
        )  # fmt: skip
