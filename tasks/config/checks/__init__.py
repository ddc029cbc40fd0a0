"""Checks of a configuration: everything that would cost a run minutes, or be wrong in silence.

    settings    settings that contradict each other, whatever the model; data files
    inputs      the user's files: an audit of the base, the first rows as prepare_data reads them
    model       the base model's folder, and what the objective needs of it
    peft        the adapter's modules in the model, and QLoRA's 4-bit base
    online      sections `rl`, `rollout` and `reward`, and servers of rollouts
    machine     GPUs, number formats, libraries, disk
    memory      memory of ranks and engines
    release     quantised models, conditions of the gate, keys, servers that have to answer

Each module has a function `problems`; none imports torch. `findings` calls all of them, and
`preflight` raises one error with every problem. What pydantic or a library refuses within seconds
is not checked here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.config.checks import inputs, machine, memory, model, online, peft, release, settings
from tasks.config.checks.context import Context, installed
from tasks.config.checks.memory import RankMemory
from tasks.core.errors import ConfigError
from tasks.core.finding import Finding

__all__ = ["findings", "installed", "preflight"]

_CHECKS = (settings, inputs, model, peft, online, machine, memory, release)


def findings(
    values: dict[str, Any], runs: Path, rank: RankMemory | None = None, *, rewarded: bool = False
) -> list[Finding]:
    """Return every problem of a run on this machine.

    Args:
        runs: `paths.runs`, which may not exist yet.
        rank: memory of a rank; None if it is not known.
        rewarded: True if an earlier step of the chain trains the reward model.
    """
    known, problems = model.look_at(values["model"])
    context = Context(values, known, runs, rank, rewarded=rewarded)
    return [*problems, *(finding for check in _CHECKS for finding in check.problems(context))]


def preflight(problems: Sequence[Finding]) -> list[Finding]:
    """Raise one error with every problem, and return the warnings.

    Args:
        problems: as `findings` returns them.

    Raises:
        ConfigError: there are errors; its details have one line each.
    """
    errors = [finding for finding in problems if finding.severity == "error"]
    if errors:
        count = f"{len(errors)} problem{'s' * (len(errors) > 1)}"
        raise ConfigError(
            f"the preflight found {count}; nothing was started",
            details=[str(finding) for finding in errors],
        )
    return [finding for finding in problems if finding.severity == "warning"]
