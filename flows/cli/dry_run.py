"""In the mechanism's place: says what a run would do instead of doing it.

    looker = Looker(store, force)
    Chain(settings, cast(Mechanism, looker), looker.scorer).deliver()
    looker.seen         [("prepare_data", "up to date: 3f0c..."), ("train", "to run: 9a1e..."), ...]

Keys are as in a real run. Once a stage has to run, the keys of those that read it are not known,
and they have to run too. Whether the files of an artifact are still what they were is for the run
to verify.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.artifact import Artifact, open_artifact
from tasks.pipeline.stage import Stage, StageResult, plain


@dataclass
class Looker:
    """Takes the place of `tasks.pipeline.stage.Mechanism`.

    Attributes:
        store: folder of the published artifacts.
        force: names of stages that run even if an intact artifact exists; `link.stage`: of one
            link.
        link: whose chain it is; empty where there is only one.
        seen: (stage, "to run", "to run (forced): key" or "up to date: key"), in order.
        results: stays empty: nothing runs.
    """

    store: Path
    force: frozenset[str]
    link: str = ""
    seen: list[tuple[str, str]] = field(default_factory=list)
    results: list[StageResult] = field(default_factory=list)

    @property
    def logs(self) -> Path:
        """Where logs would go; no run has this name."""
        return self.store.parent / "logs" / "planned"

    @property
    def scorer(self) -> ReferenceScorer:
        """A scorer that nobody asks, so that it never starts anything."""
        return ReferenceScorer(
            log=logging.getLogger(__name__), log_path=self.logs / "reference.log"
        )

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
        stage.require_covers(function)
        artifact = Artifact(stage.kind, self.store / stage.kind, "")
        state = "to run"
        if all(given.digest for given in inputs.values()):
            path = artifact.path / stage.key(plain(config), inputs)
            if {stage.name, f"{self.link}.{stage.name}"} & self.force:
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
