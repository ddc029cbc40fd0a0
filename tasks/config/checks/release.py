"""Problems that would show after training: quantised models, the gate, servers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from tasks.config.checks import Context
from tasks.config.checks.online import function
from tasks.config.checks.quantized import quantizing
from tasks.config.checks.servers import prefect_reachable, public, reachable
from tasks.core.errors import Finding
from tasks.core.machine import installed
from tasks.lm_eval import is_file, task_name
from tasks.release.gate import EXAMPLES, LM_EVAL, NUMBERS, names_for, parse, run_kinds
from tasks.rl.user_code import EVAL


def problems(context: Context) -> Iterator[Finding]:
    """Yield the problems that would show after training."""
    settings = context.settings
    is_reward = context.objective == "reward"
    yield from quantizing(settings["convert"], context.known.config, is_reward=is_reward)
    yield from function(settings["eval"]["function"], EVAL)
    if not is_reward:
        yield from lm_eval_tasks(settings["eval"]["lm_eval"])
    yield from conditions(settings)
    yield from reachable(settings["tracking"]["uri"])
    yield from prefect_reachable()
    yield from public(settings["tracking"])


def conditions(settings: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each condition of the gate that this run cannot judge."""
    names, stated = names_for(run_kinds(settings)), settings["gate"]["conditions"] or {}
    tasks = []
    for task in settings["eval"]["lm_eval"]:
        with suppress(OSError, ValueError):  # `lm_eval_tasks` reports a file that cannot be read
            tasks.append(task_name(task))
    for name, text in stated.items():
        key, harness = f"gate.conditions.{name}", name.startswith(LM_EVAL)
        if harness and not any(name.startswith(f"{LM_EVAL}{task}.") for task in tasks):
            override = " or ".join(f"{LM_EVAL}{task}.acc" for task in tasks)
            allowed = f"{LM_EVAL}<task>.<metric> of a task in eval.lm_eval"
            yield Finding(key, "no such task", allowed, override or "eval.lm_eval=[<task>]")
        elif not harness and name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.3) or names
            yield Finding(key, "not measured", "a number of this run", " or ".join(near))
        else:
            try:
                to = parse(name, text).to
            except ValueError as error:
                yield Finding(key, str(error), "a comparison with a limit", f"such as {EXAMPLES}")
                continue
            if to == "base" and not (harness or (name in NUMBERS and NUMBERS[name].base)):
                allowed = "the model before training has no such number"
                yield Finding(key, str(text), allowed, "a number, or champion, as the limit")


def lm_eval_tasks(tasks: list[str]) -> Iterator[Finding]:
    """Yield a finding for each task of `eval.lm_eval` that cannot be run."""
    if tasks and not installed("lm-eval"):
        value = f"[{', '.join(tasks)}]"
        yield Finding("eval.lm_eval", value, "lm-eval is not installed", "make setup-lm-eval")
    for task in filter(is_file, tasks):
        try:
            task_name(task)
        except (OSError, ValueError) as error:
            override = "eval.lm_eval=[<file>.yaml]"
            yield Finding("eval.lm_eval", f"{task}: {error}", "a task in YAML", override)
