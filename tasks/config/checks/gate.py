"""Check before any work: conditions of the gate, and the tasks of lm-evaluation-harness."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tasks.core.finding import Finding
from tasks.lm_eval import is_file, task_name
from tasks.release.gate import EXAMPLES, parse
from tasks.release.numbers import LM_EVAL, NUMBERS, names_for, run_kinds


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
    harness = _names(settings["eval"]["lm_eval"])
    for name, text in stated.items():
        key = f"gate.conditions.{name}"
        of_harness = name.startswith(LM_EVAL)
        if of_harness and not any(name.startswith(f"{LM_EVAL}{task}.") for task in harness):
            allowed = f"{LM_EVAL}<task>.<metric>, with a task of eval.lm_eval"
            advice = (
                " or ".join(f"{LM_EVAL}{task}.acc" for task in harness) or "eval.lm_eval=[<task>]"
            )
            yield Finding(key, "no such task", allowed, advice)
            continue
        if not of_harness and name not in names:
            yield Finding(
                key, _unknown(name), "this run does not measure it", _nearest(name, names)
            )
            continue
        try:
            condition = parse(name, text)
        except ValueError as error:
            yield Finding(key, str(error), "a comparison with a limit", f"such as {EXAMPLES}")
            continue
        based = of_harness or (name in NUMBERS and NUMBERS[name].base)
        if condition.to == "base" and not based:
            allowed = "the model before training has no such number"
            yield Finding(key, str(text), allowed, "a number, or champion, as the limit")


def lm_eval_tasks(
    section: Mapping[str, Any], objective: str, version: Callable[[str], str]
) -> Iterator[Finding]:
    """Yield a finding for each task of `eval.lm_eval` that cannot be run.

    Args:
        section: section `eval`.
        objective: `train.objective`.
        version: version of a distribution; "0" if it is not installed.
    """
    tasks = section["lm_eval"]
    if not tasks or objective == "reward":
        return
    if version("lm-eval") == "0":
        shown = f"[{', '.join(tasks)}]"
        yield Finding("eval.lm_eval", shown, "lm-eval is not installed", "make setup-lm-eval")
    for task in filter(is_file, tasks):
        try:
            task_name(task)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            allowed = "a task in YAML, as lm-evaluation-harness reads it"
            yield Finding(
                "eval.lm_eval", f"{task}: {reason}", allowed, "eval.lm_eval=[<file>.yaml]"
            )


def _names(tasks: Sequence[str]) -> list[str]:
    """Return the names of tasks; one whose file cannot be read has none."""
    names = []
    for task in tasks:
        with suppress(OSError, ValueError):
            names.append(task_name(task))
    return names


def _unknown(name: str) -> str:
    return "not measured with these settings" if name in NUMBERS else "no such number"


def _nearest(name: str, names: list[str]) -> str:
    """Return the names nearest to one that is not measured; all of them if none is near."""
    bare = name.replace("/", ".")
    by_key = [n for n in names if n in NUMBERS and NUMBERS[n].key.replace("/", ".") == bare]
    leaves = [n for n in names if n.rpartition(".")[2] == bare.rpartition(".")[2]]
    near = by_key or leaves[:3] or difflib.get_close_matches(bare, names, n=3, cutoff=0.5)
    return " or ".join(near or [n for n in names if n in NUMBERS])
