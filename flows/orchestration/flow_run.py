"""One run of a flow: its logs, its tracked run, and a summary that is written however it ends.

    with in_prefect("rlhf", composed) as host:
        flow_run = FlowRun.begin("rlhf", composed, host, tracker=tracker)
        flow_run.run(title, stages)      # calls `stages(flow_run)`

A flow runs in a `Host`: Prefect, or this process alone.
"""

from __future__ import annotations

import contextlib
import getpass
import shlex
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from flows.cli.composed import Composed
from flows.monitoring import RunRecord
from flows.orchestration.devices import reserve
from flows.orchestration.evaluation import evaluation
from flows.orchestration.summary import Summary, stage_entry
from flows.report.page import REPORT, write_report
from flows.servers.services import mlflow_page
from tasks.core.disk import disk_full_named
from tasks.core.errors import ContractError, PlumblineError, TrackingError
from tasks.core.redaction import redact, redact_error
from tasks.evaluation.scoring import REQUEST_S, ReferenceScorer
from tasks.pipeline.artifact import Artifact, sweep
from tasks.pipeline.locks import FOREVER, Patience
from tasks.pipeline.stage import REFERENCE_LOG, Call, Mechanism
from tasks.process.child import PROJECT
from tasks.tracking.tracker import Tracker


@dataclass(frozen=True)
class Host:
    """Environment of a flow: Prefect, or this process alone.

    Attributes:
        call: calls the work of a stage, or of what follows the last one.
        show: shows the table of checks (Markdown) at the end of a flow.
        page: URL of the flow run's page; empty if nothing serves it.
    """

    run_id: str
    log: Any
    call: Call
    show: Callable[[str], object]
    tags: Mapping[str, str] = field(default_factory=dict)
    patience: Patience = FOREVER
    page: str = ""


def in_this_process(run_id: str, log: Any, patience: Patience = FOREVER) -> Host:
    """Return a host without Prefect: stages are called directly."""

    def call(name: str, work: Callable[[Any], Any], inputs: Mapping[str, Artifact]) -> Any:
        return work(log)

    return Host(run_id, log, call, show=lambda table: None, patience=patience)


def tracker_of(composed: Composed, *, recorded: bool = True) -> Tracker:
    """Return the MLflow tracker of a configuration; it records nothing if not `recorded`."""
    experiment, reports = composed.settings["tracking"]["experiment"], composed.runs / "reports"
    uri, root = composed.tracking_uri, composed.tracking_root
    return Tracker(uri, experiment, root, reports, recorded=recorded)


def provenance() -> dict[str, str]:
    """Return tags about the user and the commit of this checkout, as MLflow names them."""
    tags = {"mlflow.source.type": "LOCAL"}
    with contextlib.suppress(KeyError, OSError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    words = ["git", "-C", str(PROJECT), "rev-parse", "--show-toplevel", "HEAD"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        top, commit = subprocess.run(
            words, check=True, capture_output=True, text=True, timeout=5
        ).stdout.split("\n")[:2]
        if Path(top) == PROJECT:  # an installed package may lie in a user's own repository
            tags["mlflow.source.git.commit"] = commit
    return tags


@dataclass
class FlowRun:
    """One run of a flow; the code that runs the stages adds to its summary and its tags.

    `run_id` is the name of its folders under `<paths.runs>/logs` and `reports`.
    """

    composed: Composed
    host: Host
    mechanism: Mechanism
    summary: Summary
    run_id: str
    record: RunRecord
    started: float = field(default_factory=time.monotonic)
    tags: dict[str, str] = field(default_factory=dict)

    @classmethod
    def begin(
        cls,
        flow: str,
        composed: Composed,
        host: Host,
        *,
        tracker: Tracker,
        exp: str | None = None,
        overrides: Sequence[str] = (),
    ) -> FlowRun:
        """Create the folder for logs, and remove the staging folders of dead runs.

        `overrides` are the words that were typed after the command, without passwords.
        """
        store = composed.runs / "artifacts"
        run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{host.run_id[:8]}"
        logs = composed.runs / "logs" / run_id
        logs.mkdir(parents=True)
        sweep(store)
        record = RunRecord(composed.runs / "reports" / run_id, flow, exp, host.call)
        mechanism = Mechanism(
            store,
            logs,
            tracker,
            record.call,
            frozenset(composed.settings["force"]),
            host.patience,
            devices=partial(reserve, composed, patience=host.patience),
            on_event=record.on_event,
            timeouts=composed.settings["timeouts"],
        )
        summary = Summary("running", flow, exp, 0.0, run=run_id)
        if overrides:
            summary.command = f"python flows/{flow}.py {shlex.join(overrides)}"
        return cls(composed, host, mechanism, summary, run_id, record)

    def scorer(self, threads: int | None) -> ReferenceScorer:
        """Return the scorer of the run's stages; no request ends before the limit of its stage."""
        settings, mechanism = self.composed.settings, self.mechanism
        limits = (settings["smoke"]["timeout_s"], *settings["timeouts"].values())
        return ReferenceScorer(
            log=self.host.log,
            log_path=mechanism.logs / REFERENCE_LOG,
            threads=threads,
            timeout_s=max(REQUEST_S, *(limit or 0.0 for limit in limits)),
        )

    def run(self, title: str, stages: Callable[[FlowRun], None]) -> dict[str, Any]:
        """Run the stages inside a tracked run. Returns the summary."""
        settings, text = self.composed.recorded, self.composed.text
        full_disk, tracker = partial(disk_full_named, self.composed.runs), self.mechanism.tracker
        with self.record:
            try:
                with full_disk(), tracker.flow(title, settings, text, self._tags()) as run_id:
                    self.summary.mlflow_run_id = run_id or None
                    self._find_pages()
                    try:
                        with full_disk():
                            stages(self)
                    except Exception as error:  # MLflow gets the page while its run is open
                        self._fail(error)
                        raise
                    self._end("completed")
            except BaseException as error:
                if self.summary.status != "failed":
                    self._fail(error)
                raise
        return asdict(self.summary)

    def _fail(self, error: BaseException) -> None:
        """Write the summary of a run that this error ends."""
        status, summary = "failed", self.summary
        if isinstance(error, PlumblineError):
            summary.error, summary.error_report = error.message, error.report()
            summary.exit_status = error.exit_code
            if isinstance(error, ContractError) and error.bound is not None:
                summary.refused = {"stage": error.stage, **error.bound, "ok": False}
        else:
            redact_error(error)
            summary.error, summary.exit_status = redact(f"{type(error).__name__}: {error}"), 1
        if not isinstance(error, Exception):
            status, summary.error = "cancelled", "interrupted"
            # Our signal handlers raise the status; Prefect has an error of its own for SIGTERM.
            ours = isinstance(error, KeyboardInterrupt | SystemExit) and error.args
            summary.exit_status = error.args[0] if ours else 143
        try:
            self._end(status)
        except OSError as problem:  # a full disk must not hide the error of the run
            self.host.log.warning("the summary of this run could not be written: %s", problem)

    def _tags(self) -> dict[str, str]:
        flow = self.summary.flow
        tags = {"flow": flow, "mlflow.source.name": f"flows/{flow}.py", **provenance()}
        experiment = {} if self.summary.exp is None else {"exp": self.summary.exp}
        page = {"prefect.flow_run_url": self.host.page} if self.host.page else {}
        return {**tags, **self.tags, **self.host.tags, **page, **experiment}

    def _find_pages(self) -> None:
        """Note the pages of this run in Prefect and MLflow, once MLflow has the run."""
        pages, uri = self.summary.pages, self.composed.settings["tracking"]["uri"]
        url = mlflow_page(self.composed.runs, uri, self.mechanism.tracker.page)
        pages |= {"prefect": self.host.page} if self.host.page else {}
        pages |= {"mlflow": url} if url else {}

    def _end(self, status: str) -> None:
        """Write the summary to disk, to Prefect and to the tracker."""
        summary, results = self.summary, self.mechanism.results
        summary.status = status
        summary.seconds = round(time.monotonic() - self.started, 1)
        if status == "completed":
            summary.exit_status = TrackingError.exit_code if summary.unregistered else 0
        summary.eval = evaluation(results)
        summary.stages = summary.stages or [stage_entry(result) for result in results]
        for result in results:
            if "peak_memory" in result.metrics:
                peak = {"peak": int(result.metrics["peak_memory"])}
                summary.memory[result.name] = summary.memory.get(result.name, {}) | peak
        interrupted = status == "cancelled"  # a process that has seconds left: no request
        if not interrupted:
            self._find_pages()
            summary.tracking = self.mechanism.tracker.settle() or None
        texts = {"config.yaml": self.composed.text}
        written = summary.write(self.composed.runs, self.run_id, texts)
        report = write_report(self.composed.runs, self.run_id, self.host.log)
        if interrupted:
            return
        self.host.show(summary.markdown(report))
        scores = {f"eval/{k}": v for k, v in summary.eval.items() if v is not None}
        files = {"summary.json": written.read_text()}
        if report is not None:
            files[REPORT] = report.read_text()
        numbers = {**scores, "seconds": summary.seconds}
        self.mechanism.tracker.log_parent(numbers, files, summary.markdown())
