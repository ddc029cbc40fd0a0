"""One run of a flow: its logs, its tracked run, and a summary that is written however it ends.

    flow_run = FlowRun.begin("rlhf", composed, in_prefect("rlhf"), tracker=tracker)
    flow_run.run(title, stages)      # calls `stages(flow_run)`

A flow runs in a `Host`: Prefect, or this process alone. `DryRun` takes the place of the mechanism
for a plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from flows.cli.config import Composed
from flows.monitoring.prometheus import MetricsFile
from flows.monitoring.run_record import RunRecord
from flows.orchestration.devices import reserve
from flows.orchestration.evaluation import evaluation
from flows.orchestration.summary import Summary, stage_entry
from tasks.core.disk import disk_full_named
from tasks.core.errors import ArtifactError, PlumblineError, TrackingError
from tasks.core.redaction import redact
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.artifact import Artifact, open_artifact, sweep
from tasks.pipeline.locks import FOREVER, Patience
from tasks.pipeline.report import FlowTracker, StageResult
from tasks.pipeline.stage import Call, Mechanism, Stage, plain
from tasks.pipeline.tracking import Tracker


@dataclass(frozen=True)
class Host:
    """Environment of a flow: Prefect, or this process alone.

    Attributes:
        run_id: id of the flow run, Prefect's or a random one.
        log: logger of the flow.
        call: calls the work of a stage.
        last: calls what follows the last stage: (name, its work, artifacts that it reads by role).
        show: shows the table of checks (Markdown) at the end of a flow.
        tags: tags of the tracked run.
        unrecorded: returns a line about what Prefect has not recorded, or nothing.
        patience: how long to wait for other runs.
    """

    run_id: str
    log: Any
    call: Call
    last: Callable[[str, Callable[[], Any], Mapping[str, Artifact]], Any]
    show: Callable[[str], object]
    tags: Mapping[str, str] = field(default_factory=dict)
    unrecorded: Callable[[], str] = lambda: ""
    patience: Patience = FOREVER


def in_prefect(name: str, patience: Patience = FOREVER) -> Host:
    """Return the host of the current Prefect flow run.

    Args:
        name: name of the flow.
        patience: how long to wait for other runs.
    """
    from prefect import get_run_logger
    from prefect.artifacts import create_markdown_artifact
    from prefect.runtime import flow_run

    from flows.orchestration.prefect_tasks import PrefectTasks
    from flows.orchestration.prefect_watch import current

    def show(table: str) -> None:
        watch = current()
        if watch is not None and watch.gone:
            return
        try:
            create_markdown_artifact(table, key=f"{name}-checks", description="checks")
        except Exception as error:
            get_run_logger().warning("Prefect has not recorded the table of checks: %s", error)

    def unrecorded() -> str:
        watch = current()
        if watch is None:
            return ""
        watch.check()
        return watch.report()

    run_id = str(flow_run.id)
    tags = {"prefect.flow_run_id": run_id}
    tasks = PrefectTasks()
    return Host(run_id, get_run_logger(), tasks, tasks.last, show, tags, unrecorded, patience)


def in_this_process(run_id: str, log: Any, patience: Patience = FOREVER) -> Host:
    """Return a host without Prefect: stages are called directly.

    Args:
        run_id: id of this run.
        log: logger of the flow.
        patience: how long to wait for other runs.
    """

    def call(
        name: str, work: Callable[[Any], StageResult], inputs: Mapping[str, Artifact]
    ) -> StageResult:
        return work(log)

    def last(name: str, work: Callable[[], Any], inputs: Mapping[str, Artifact]) -> Any:
        return work()

    return Host(run_id, log, call, last, show=lambda table: None, patience=patience)


def tracker_of(composed: Composed) -> Tracker:
    """Return the MLflow tracker of a configuration."""
    experiment = composed.settings["tracking"]["experiment"]
    events = composed.runs / "tensorboard" if composed.settings["tracking"]["tensorboard"] else None
    outbox = composed.runs / "mlflow" / "outbox"
    return Tracker(composed.tracking_uri, experiment, composed.tracking_root, outbox, events)


@dataclass
class FlowRun:
    """One run of a flow.

    Attributes:
        composed: the configuration.
        host: what the flow runs in.
        mechanism: runs the stages.
        summary: the summary; the code that runs the stages adds to it.
        run_id: name of the run's folders under `<paths.runs>/logs` and `reports`.
        record: what the run does, on disk while it goes on.
        started: start time (`time.monotonic`).
    """

    composed: Composed
    host: Host
    mechanism: Mechanism
    summary: Summary
    run_id: str
    record: RunRecord
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(
        cls,
        flow: str,
        composed: Composed,
        host: Host,
        *,
        tracker: FlowTracker,
        exp: str | None = None,
    ) -> FlowRun:
        """Create the folder for logs, and remove the staging folders of dead runs.

        Args:
            flow: name of the flow.
            composed: the configuration.
            host: what the flow runs in.
            tracker: records the flow and its stages.
            exp: the chosen experiment, if there is one.
        """
        store = composed.runs / "artifacts"
        run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{host.run_id[:8]}"
        logs = composed.runs / "logs" / run_id
        logs.mkdir(parents=True)
        sweep(store)
        force = frozenset(composed.settings["force"])
        metrics = MetricsFile(composed.runs, composed.settings["tracking"]["prometheus"])
        about = {"flow": flow, "exp": exp}
        record = RunRecord(composed.runs / "reports" / run_id, about, host.call, metrics.write)
        mechanism = Mechanism(store, logs, tracker, record.call, force, host.patience)
        mechanism.timeouts = composed.settings.get("timeouts", {})
        mechanism.devices = partial(reserve, composed, patience=host.patience)
        mechanism.on_event = record.on_event
        summary = Summary("running", flow, exp, 0.0, run=run_id)
        return cls(composed, host, mechanism, summary, run_id, record)

    def run(self, title: str, stages: Callable[[FlowRun], None]) -> dict[str, Any]:
        """Run the stages inside a tracked run; write the summary however they end.

        Args:
            title: title of the tracked run.
            stages: runs the stages with `mechanism`, and adds to `summary`.

        Returns:
            The summary.
        """
        with self.record:
            return self._run(title, stages)

    def _run(self, title: str, stages: Callable[[FlowRun], None]) -> dict[str, Any]:
        settings, text = self.composed.settings, self.composed.text
        try:
            with (
                disk_full_named(self.composed.runs),
                self.mechanism.tracker.flow(title, settings, text, self._tags) as run_id,
            ):
                self.summary.mlflow_run_id = run_id or None
                stages(self)
                self._end("completed")
        except PlumblineError as error:
            self.summary.error = error.message
            self.summary.exit_status = error.exit_code
            self._end_badly("failed")
            raise
        except BaseException as error:
            failed = isinstance(error, Exception)
            text = redact(f"{type(error).__name__}: {error}")
            self.summary.error = text if failed else "interrupted"
            # The handlers of flows/cli/entry.py raise the status; Prefect has its own for SIGTERM.
            ours = isinstance(error, KeyboardInterrupt | SystemExit) and error.args
            self.summary.exit_status = 1 if failed else error.args[0] if ours else 143
            self._end_badly("failed" if failed else "cancelled")
            raise
        return asdict(self.summary)

    @property
    def _tags(self) -> dict[str, str]:
        experiment = {} if self.summary.exp is None else {"exp": self.summary.exp}
        return {**self.host.tags, **experiment}

    def _end_badly(self, status: str) -> None:
        """Write the summary of a failed run. A full disk must not hide the error of the run."""
        try:
            self._end(status)
        except OSError as error:
            self.host.log.warning("the summary of this run could not be written: %s", error)

    def _end(self, status: str) -> None:
        """Write the summary to disk, to Prefect and to the tracker."""
        summary = self.summary
        summary.status = status
        summary.seconds = round(time.monotonic() - self.started, 1)
        if status == "completed":
            summary.exit_status = TrackingError.exit_code if summary.unregistered else 0
        summary.eval = evaluation(self.mechanism.results)
        if not summary.stages:
            summary.stages = [stage_entry(result) for result in self.mechanism.results]
        if status != "cancelled":  # an interrupted process has seconds left: no request
            summary.tracking = self.mechanism.tracker.settle() or None
            summary.prefect = self.host.unrecorded() or None
        written = summary.write(
            self.composed.runs, self.run_id, {"config.yaml": self.composed.text}
        )
        if status == "cancelled":
            return
        self.host.show(summary.markdown())
        if status == "completed":
            scores = {f"eval/{k}": v for k, v in summary.eval.items() if v is not None}
            numbers = {**scores, "seconds": summary.seconds}
            files = {"summary.json": written.read_text()}
            self.mechanism.tracker.log_parent(numbers, files, summary.markdown())


@dataclass
class DryRun:
    """A `StageRunner` that runs nothing and reports what a run would do.

        dry_run = DryRun(store, force)
        Chain(settings, dry_run, dry_run.scorer).deliver()
        dry_run.states      # [("prepare_data", "up to date: 3f0c..."), ("train", "to run"), ...]

    Keys are as in a real run. If a stage has to run, the digest of its artifact is unknown, so that
    the stages that read it have no key and have to run, too. Contents of existing artifacts are not
    verified.

    Attributes:
        store: folder of the published artifacts.
        force: names of stages that run again in any case; `step.stage` for those of one step.
        step: name of the step; empty if the run has a single one.
        states: (stage, "to run", "to run (forced): key" or "up to date: key"), in order.
        results: stays empty.
    """

    store: Path
    force: frozenset[str]
    step: str = ""
    states: list[tuple[str, str]] = field(default_factory=list)
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
        stage.require_covers(function)
        artifact = Artifact(stage.kind, self.store / stage.kind, "")
        state = "to run"
        if all(given.digest for given in inputs.values()):
            path = artifact.path / stage.key(plain(config), inputs)
            if {stage.name, f"{self.step}.{stage.name}"} & self.force:
                state = f"to run (forced): {path.name}"
            elif not path.exists():
                state = f"to run: {path.name}"
            else:
                artifact, state = _published(path, stage.kind)
        self.states.append((stage.name, state))
        return StageResult(stage.name, artifact, True, 0.0, (), None, {})


def _published(path: Path, kind: str) -> tuple[Artifact, str]:
    try:
        return open_artifact(path, kind), f"up to date: {path.name}"
    except ArtifactError as error:
        return Artifact(kind, path, ""), f"to run: {error.message}"
