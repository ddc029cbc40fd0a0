"""Checks of a configuration: everything that would cost a run minutes, or be wrong in silence.

    settings    settings that contradict each other, whatever the model
    inputs      the user's files: an audit of the base, the first rows as prepare_data reads them
    model       the base model's folder, and what objective and adapter need of it
    online      sections `rl`, `rollout` and `reward`, and servers of rollouts
    machine     GPUs, number formats, libraries, disk
    memory      memory of ranks and engines
    release     conditions of the gate, lm-evaluation-harness
    quantized   models that cannot be quantised
    servers     servers that have to answer, names on their pages

Most modules have a function `problems`; none imports torch. `findings` calls all of them. What
pydantic or a library refuses within seconds is not checked here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.config.checks.context import Context, installed
from tasks.core.finding import Finding, preflight

__all__ = ["findings", "installed", "preflight"]


def findings(values: dict[str, Any], runs: Path, *, rewarded: bool = False) -> list[Finding]:
    """Return every problem of a run on this machine; arguments are those of `Context`."""
    # Loads most of the product: a delivery calls single checks.
    from tasks.config.checks import inputs, machine, memory, model, online, release, settings

    checks = (settings, inputs, model, online, machine, memory, release)
    known, problems = model.look_at(values["model"])
    context = Context(values, known, runs, rewarded=rewarded)
    return [*problems, *(finding for check in checks for finding in check.problems(context))]
