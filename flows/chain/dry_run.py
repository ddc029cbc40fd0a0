"""Report what a run would do, in place of running it (`plan=true`)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.artifact import Artifact, open_artifact
from tasks.pipeline.report import StageResult
from tasks.pipeline.stage import Stage, plain


@dataclass
class DryRun:
    """A `StageRunner` that runs nothing and reports what a run would do, in `states`.

    Keys are as in a real run. If a stage has to run, the digest of its artifact is unknown, so that
    the stages that read it have no key and have to run, too. Contents of existing artifacts are not
    verified.
    """

    store: Path
    force: frozenset[str]
    step: str = ""
    states: list[tuple[str, str]] = field(default_factory=list)  # stage, what would be done
    results: list[StageResult] = field(default_factory=list)

    @property
    def logs(self) -> Path:
        """Folder of the logs that a run would write."""
        return self.store.parent / "logs" / "planned"

    @property
    def scorer(self) -> ReferenceScorer:
        """A scorer that is never asked, and so never starts its child process."""
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
        context: Mapping[str, Any] | None = None,
        observe: Any = None,
        after: Mapping[str, Artifact] | None = None,
    ) -> StageResult:
        """Note the state of one stage. Returns its artifact, without digest if it has to run."""
        artifact = Artifact(stage.kind, self.store / stage.kind, "")
        state = "to run"
        if all(each.digest for each in inputs.values()):
            path = artifact.path / stage.key(plain(config), inputs)
            if {stage.name, f"{self.step}.{stage.name}"} & self.force:
                state = f"to run (forced): {path.name}"
            elif not path.exists():
                state = f"to run: {path.name}"
            else:
                try:
                    artifact, state = open_artifact(path, stage.kind), f"up to date: {path.name}"
                except ArtifactError as error:
                    artifact, state = Artifact(stage.kind, path, ""), f"to run: {error.message}"
        self.states.append((stage.name, state))
        return StageResult(stage.name, artifact, True, 0.0, (), None, {})
