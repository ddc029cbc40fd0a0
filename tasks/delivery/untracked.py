"""No tracker: the mechanism's calls, answered without MLflow, which takes seconds to import."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.pipeline.artifact import Artifact, Origin
from tasks.pipeline.tracking import StageRun, Tracker


class UntrackedRun(StageRun):
    """A stage's run that nobody keeps."""

    def __init__(self) -> None:
        self.run_id = ""

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Forget them: they are in the artifact's manifest."""

    def flush(self) -> None:
        """Nothing is pending."""

    def contract(self, verdicts: list[dict[str, Any]]) -> None:
        """Forget it: it is in the artifact."""

    def details(self, notes: Mapping[str, Any]) -> None:
        """Forget them: they are in the manifest."""

    def finish(self, artifact: Artifact, metrics: Mapping[str, float], *, reused: bool) -> None:
        """Nobody to tell."""


class Untracked(Tracker):
    """A flow's tracker that keeps nothing."""

    def __init__(self) -> None:
        self.run_id = ""

    @contextlib.contextmanager
    def flow(
        self, name: str, config: Mapping[str, Any], text: str, tags: Mapping[str, str]
    ) -> Iterator[str]:
        """No parent run."""
        yield ""

    @contextlib.contextmanager
    def stage(self, name: str, origin: Origin) -> Iterator[StageRun]:
        """No child run."""
        yield UntrackedRun()

    def log_parent(
        self, metrics: Mapping[str, float], files: Mapping[str, str], description: str = ""
    ) -> None:
        """Nothing to log to."""
