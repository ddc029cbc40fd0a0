"""Check the conditions of the gate before any work: names of numbers, limits, the base."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.core.finding import Finding
from tasks.release.gate import EXAMPLES, parse
from tasks.release.numbers import NUMBERS, names_for, run_kinds


def conditions(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each condition that this run cannot judge.

    Args:
        settings: configuration of the step whose model is registered.
    """
    names, stated = names_for(run_kinds(settings)), settings["gate"]["conditions"] or {}
    if not isinstance(stated, Mapping):
        example = 'gate.conditions={eval.exact_match: ">= base + 0.1"}'
        yield Finding("gate.conditions", str(stated), "limits by the name of a number", example)
        return
    for name, text in stated.items():
        key = f"gate.conditions.{name}"
        if name not in names:
            yield Finding(
                key, _unknown(name), "this run does not measure it", _nearest(name, names)
            )
            continue
        try:
            condition = parse(name, text)
        except ValueError as error:
            yield Finding(key, str(error), "a comparison with a limit", f"such as {EXAMPLES}")
            continue
        if condition.to == "base" and not (name in NUMBERS and NUMBERS[name].base):
            allowed = "the model before training has no such number"
            yield Finding(key, str(text), allowed, "a number, or champion, as the limit")


def _unknown(name: str) -> str:
    return "not measured with these settings" if name in NUMBERS else "no such number"


def _nearest(name: str, names: list[str]) -> str:
    """Return the names nearest to one that is not measured; all of them if none is near."""
    bare = name.replace("/", ".")
    by_key = [n for n in names if n in NUMBERS and NUMBERS[n].key.replace("/", ".") == bare]
    leaves = [n for n in names if n.rpartition(".")[2] == bare.rpartition(".")[2]]
    near = by_key or leaves[:3] or difflib.get_close_matches(bare, names, n=3, cutoff=0.5)
    return " or ".join(near or [n for n in names if n in NUMBERS])
