"""`plan=true`: what a run would do. Starts nothing. And `check`, which every run passes first."""

from __future__ import annotations

import json
import sys
from typing import Any, cast

from flows.chain import Chain
from flows.config import Composed
from flows.looker import Looker
from tasks.errors import ConfigError
from tasks.preflight import findings, preflight
from tasks.preflight.machine import has_gpu
from tasks.preflight.model import look
from tasks.stage import Mechanism
from tasks.training.job import Settings
from tasks.training.memory import MemoryEstimate, estimate
from tasks.training.zero_config import deepspeed_config


def check(composed: Composed) -> None:
    """Print the preflight's warnings.

    Raises:
        ConfigError: with everything that rules the run out.
    """
    for warning in preflight(composed.settings, composed.runs, _estimate(composed.settings)):
        print(f"warning: {warning}", file=sys.stderr)


def render(composed: Composed) -> str:
    """The plan as text: stages, DeepSpeed's configuration, memory, findings. Writes nothing."""
    settings = composed.settings
    found = [f"  {f.severity}: {f}" for f in findings(settings, composed.runs, _estimate(settings))]
    return "\n".join(
        [
            f"runs: {composed.runs}",
            "stages:",
            *(f"  {name:<13} {state}" for name, state in forecast(composed)),
            f"memory a rank: {_memory(settings)}",
            "deepspeed:",
            *_deepspeed(settings),
            "preflight:",
            *(found or ["  nothing to report"]),
        ]
    )


def forecast(composed: Composed) -> list[tuple[str, str]]:
    """(stage, "to run", "forced" or "up to date: key") for every stage of the chain, in order.

    Found by sending the chain through a mechanism that only looks: `flows/looker.py`.
    """
    settings = composed.settings
    looker = Looker(composed.runs / "artifacts", frozenset(settings["force"]))
    Chain(settings, cast(Mechanism, looker), looker.scorer).deliver()
    return [*looker.seen, ("register", "to run")]


def _estimate(settings: dict[str, Any]) -> MemoryEstimate | None:
    """None when the model's dimensions are not known before it is fetched."""
    known, _ = look(settings["model"]["kind"], settings["model"]["path"])
    resolved = _resolved(settings)
    if not known.config or resolved.world_size < 1:
        return None  # the preflight says why
    try:
        return estimate(known.config, resolved, resolved.world_size, gpu=has_gpu())
    except KeyError:
        return None  # an architecture that names its dimensions differently


def _memory(settings: dict[str, Any]) -> str:
    found = _estimate(settings)
    if found is None:
        return "unknown: no config.json whose dimensions can be read"
    parts = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in found.parts().items())
    return f"{found.total / 2**20:.1f} MiB ({parts})"


def _resolved(settings: dict[str, Any]) -> Settings:
    names = ("train", "peft", "zero", "model", "seed")
    return Settings.from_sections(**{name: settings[name] for name in names})


def _deepspeed(settings: dict[str, Any]) -> list[str]:
    resolved = _resolved(settings)
    try:
        config = deepspeed_config(resolved, resolved.world_size)
    except ConfigError as error:
        return [f"  none: {error}"]
    return [f"  {line}" for line in json.dumps(config, indent=2).splitlines()]
