"""Checks of a configuration: everything that would cost a run minutes, or be wrong in silence.

    settings    settings that contradict each other, whatever the model; data files
    inputs      the user's files: an audit of the base, the first rows as prepare_data reads them
    model       the base model's folder, and what the objective needs of it
    peft        the adapter's modules in the model, and QLoRA's 4-bit base
    online      sections `rl`, `rollout` and `reward`, and servers of rollouts
    machine     GPUs, number formats, libraries, disk
    memory      memory of ranks and engines
    release     quantised models, conditions of the gate, keys, servers that have to answer

Each module has a function `problems`; none imports torch. `findings` calls all of them. What
pydantic or a library refuses within seconds is not checked here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.config.checks import inputs, machine, memory, model, online, peft, release, settings
from tasks.config.checks.context import Context, installed
from tasks.core.finding import Finding, preflight

__all__ = ["findings", "installed", "preflight"]

_CHECKS = (settings, inputs, model, peft, online, machine, memory, release)


def findings(values: dict[str, Any], runs: Path, *, rewarded: bool = False) -> list[Finding]:
    """Return every problem of a run on this machine.

    Args:
        runs: `paths.runs`, which may not exist yet.
        rewarded: True if an earlier step of the chain trains the reward model.
    """
    known, problems = model.look_at(values["model"])
    context = Context(values, known, runs, rewarded=rewarded)
    return [*problems, *(finding for check in _CHECKS for finding in check.problems(context))]
