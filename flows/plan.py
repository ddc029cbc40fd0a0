"""`plan=true`: what a run would do. Starts nothing. And `check`, which every run passes first."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from flows.chain import Chain
from flows.config import Composed
from tasks.artifact import Artifact, open_artifact
from tasks.errors import ArtifactError, ConfigError
from tasks.preflight import findings, preflight
from tasks.preflight.model import look
from tasks.scoring import ReferenceScorer
from tasks.stage import Mechanism, Stage, StageResult, plain
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

    Found by sending the chain through a mechanism that only looks: keys are as in a real run. Once
    a stage has to run, the keys of those that read it are not known, and they have to run too.
    Whether the files of an artifact are still what they were is for the run to verify.
    """
    settings = composed.settings
    looker = _Looker(composed.runs / "artifacts", frozenset(settings["force"]))
    idle = _IdleScorer(log=logging.getLogger(__name__), log_path=looker.logs / "reference.log")
    Chain(settings, cast(Mechanism, looker), idle).deliver()
    return [*looker.seen, ("register", "to run")]


@dataclass
class _Looker:
    """Takes the mechanism's place: says what would happen instead of doing it."""

    store: Path
    force: frozenset[str]
    seen: list[tuple[str, str]] = field(default_factory=list)
    results: list[StageResult] = field(default_factory=list)

    @property
    def logs(self) -> Path:
        """Where logs would go; no run has this name."""
        return self.store.parent / "logs" / "planned"

    def run(
        self,
        stage: Stage,
        function: Any,
        *,
        inputs: Mapping[str, Artifact],
        config: Mapping[str, Any],
        **_: Any,
    ) -> StageResult:
        """Find what the stage published before; an artifact without digest where there is none."""
        artifact = Artifact(stage.kind, self.store / stage.kind, "")
        state = "to run"
        if all(given.digest for given in inputs.values()):
            path = artifact.path / stage.key(plain(config), inputs)
            if stage.name in self.force:
                state = f"to run (forced): {path.name}"
            elif not path.exists():
                state = f"to run: {path.name}"
            else:
                artifact, state = _published(path, stage.kind)
        self.seen.append((stage.name, state))
        return StageResult(stage.name, artifact, True, 0.0, (), None, {})


def _published(path: Path, kind: str) -> tuple[Artifact, str]:
    try:
        return open_artifact(path, kind), f"up to date: {path.name}"
    except ArtifactError as error:
        return Artifact(kind, path, ""), f"to run: {error.message}"


class _IdleScorer(ReferenceScorer):
    """Measures nothing, and starts nothing to measure with."""

    def warm(self) -> None:
        """Stay idle."""


def _estimate(settings: dict[str, Any]) -> MemoryEstimate | None:
    """None when the model's dimensions are not known before it is fetched."""
    known, _ = look(settings["model"]["kind"], settings["model"]["path"])
    resolved = _resolved(settings)
    if not known.config or resolved.dtype == "float16" or resolved.world_size < 1:
        return None  # the preflight says why
    try:
        return estimate(known.config, resolved, resolved.world_size)
    except KeyError:
        return None  # an architecture that names its dimensions differently


def _memory(settings: dict[str, Any]) -> str:
    found = _estimate(settings)
    if found is None:
        return "unknown: no config.json whose dimensions can be read"
    parts = ", ".join(f"{name} {size / 2**20:.1f} MiB" for name, size in vars(found).items())
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
