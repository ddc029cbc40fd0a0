"""A tracker that records nothing, for runs without MLflow, whose import takes seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.pipeline.artifact import Artifact, Origin
from tasks.pipeline.tracking import StageRun, Tracker


class UntrackedRun(StageRun):
    """A stage's run that records nothing."""

    def __init__(self) -> None:
        self.run_id = ""

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Do nothing: the metrics are in the artifact's manifest."""

    def flush(self) -> None:
        """Do nothing: there is no buffer."""

    def contract(self, verdicts: list[dict[str, Any]]) -> None:
        """Do nothing: the verdicts are in the artifact."""

    def details(self, notes: Mapping[str, Any]) -> None:
        """Do nothing: the notes are in the manifest."""

    def finish(self, artifact: Artifact, metrics: Mapping[str, float], *, reused: bool) -> None:
        """Do nothing: there is no run to end."""


class Untracked(Tracker):
    """A tracker that records nothing."""

    def __init__(self) -> None:
        self.run_id = ""

    @contextlib.contextmanager
    def flow(
        self, name: str, config: Mapping[str, Any], text: str, tags: Mapping[str, str]
    ) -> Iterator[str]:
        """Yield an empty id: there is no parent run."""
        yield ""

    @contextlib.contextmanager
    def stage(self, name: str, origin: Origin) -> Iterator[StageRun]:
        """Yield a run that records nothing."""
        yield UntrackedRun()

    def log_parent(
        self, metrics: Mapping[str, float], files: Mapping[str, str], description: str = ""
    ) -> None:
        """Do nothing: there is no parent run."""
