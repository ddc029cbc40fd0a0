"""One attempt at a flow: its logs, its tracked run, and a summary however it ends.

    attempt = Attempt.begin("rlhf", composed, in_prefect())
    attempt.run(title, stages)      # `stages(attempt)` runs them, and says what they came to

What a flow runs in is a `Host`: Prefect, or this process alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any

from flows.cli.config import Composed
from flows.orchestration.evaluation import evaluation
from flows.orchestration.summary import Summary, stage_entry
from tasks.core.errors import PlumblineError
from tasks.pipeline.artifact import sweep
from tasks.pipeline.stage import Call, Mechanism, StageResult, as_prefect_task
from tasks.pipeline.tracking import Tracker


@dataclass(frozen=True)
class Host:
    """What a flow runs in.

    Attributes:
        run_id: of the flow run, by whoever counts them.
        log: where the flow says what it does.
        call: who calls the work of a stage.
        show: gets the table of checks (Markdown) when a flow has ended by itself.
        tags: of the tracked run.
    """

    run_id: str
    log: Any
    call: Call
    show: Callable[[str], object]
    tags: Mapping[str, str] = field(default_factory=dict)


def in_prefect(name: str) -> Host:
    """The host of a flow run of that flow; to be called within it."""
    from prefect import get_run_logger
    from prefect.artifacts import create_markdown_artifact
    from prefect.runtime import flow_run

    def show(table: str) -> None:
        create_markdown_artifact(table, key=f"{name}-checks", description="checks")

    run_id = str(flow_run.id)
    tags = {"prefect.flow_run_id": run_id}
    return Host(run_id, get_run_logger(), as_prefect_task, show, tags)


def in_this_process(run_id: str, log: Any) -> Host:
    """No orchestrator: stages are called as they come, and only the summary tells of them."""

    def call(name: str, work: Callable[[Any], StageResult]) -> StageResult:
        return work(log)

    return Host(run_id, log, call, show=lambda table: None)


def tracker_of(composed: Composed) -> Tracker:
    """The tracker that the configuration names."""
    experiment = composed.settings["tracking"]["experiment"]
    events = composed.runs / "tensorboard" if composed.settings["tracking"]["tensorboard"] else None
    return Tracker(composed.tracking_uri, experiment, composed.tracking_root, events)


@dataclass
class Attempt:
    """What an attempt holds while it runs, and what it comes to.

    Attributes:
        composed: the configuration.
        host: what it runs in.
        mechanism: runs its stages.
        summary: what it came to; whoever runs the stages adds to it.
        run_id: name of its folders under `<paths.runs>/logs` and `reports`.
    """

    composed: Composed
    host: Host
    mechanism: Mechanism
    summary: Summary
    run_id: str
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(
        cls, flow: str, composed: Composed, host: Host, *, tracker: Tracker, exp: str | None = None
    ) -> Attempt:
        """Make its folder for logs and sweep what dead runs left behind.

        Args:
            flow: its name.
            composed: the configuration.
            host: what it runs in.
            tracker: who is told of its stages.
            exp: the experiment, where one was named.
        """
        store = composed.runs / "artifacts"
        run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{host.run_id[:8]}"
        logs = composed.runs / "logs" / run_id
        logs.mkdir(parents=True)
        sweep(store)
        force = frozenset(composed.settings["force"])
        mechanism = Mechanism(store, logs, tracker, force, host.call)
        return cls(composed, host, mechanism, Summary("running", flow, exp, 0.0), run_id)

    def run(self, title: str, stages: Callable[[Attempt], None]) -> dict[str, Any]:
        """Run the stages inside a tracked run; write the summary however they end.

        Args:
            title: of the tracked run.
            stages: runs them with `mechanism`, and adds to `summary`.

        Returns:
            the summary.
        """
        settings, text = self.composed.settings, self.composed.text
        try:
            with self.mechanism.tracker.flow(title, settings, text, self._tags) as run_id:
                self.summary.mlflow_run_id = run_id or None
                stages(self)
                self._end("completed")
        except PlumblineError as error:
            self.summary.error = error.message
            self._end("failed")
            raise
        except BaseException as error:
            ended = isinstance(error, Exception)
            self.summary.error = f"{type(error).__name__}: {error}" if ended else "interrupted"
            self._end("failed" if ended else "cancelled")
            raise
        return asdict(self.summary)

    @property
    def _tags(self) -> dict[str, str]:
        named = {} if self.summary.exp is None else {"exp": self.summary.exp}
        return {**self.host.tags, **named}

    def _end(self, status: str) -> None:
        """Write the summary, and put it where people look: disk, orchestrator, tracker."""
        summary = self.summary
        summary.status = status
        summary.seconds = round(time.monotonic() - self.started, 1)
        summary.eval = evaluation(self.mechanism.results)
        if not summary.stages:
            summary.stages = [stage_entry(result) for result in self.mechanism.results]
        written = summary.write(
            self.composed.runs, self.run_id, {"config.yaml": self.composed.text}
        )
        if status == "cancelled":
            return  # no request to a server now: there are seconds to be gone in
        self.host.show(summary.markdown())
        if summary.mlflow_run_id and status == "completed":
            scores = {f"eval/{k}": v for k, v in summary.eval.items() if v is not None}
            numbers = {**scores, "seconds": summary.seconds}
            files = {"summary.json": written.read_text()}
            self.mechanism.tracker.log_parent(numbers, files, summary.markdown())
