"""In the mechanism's place: says what a delivery would do instead of doing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.artifact import Artifact, open_artifact
from tasks.errors import ArtifactError
from tasks.stage import Stage, StageResult, plain


@dataclass
class Looker:
    """Keys are as in a real run. Once a stage has to run, keys of what reads it are not known."""

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
            state = f"to run: {path.name}"
            if stage.name in self.force:
                state = f"to run (forced): {path.name}"
            elif path.exists():
                try:
                    artifact = open_artifact(path, stage.kind)
                    state = f"up to date: {path.name}"
                except ArtifactError as error:
                    state = f"to run: {error.message}"
        self.seen.append((stage.name, state))
        return StageResult(stage.name, artifact, True, 0.0, (), None, {})
