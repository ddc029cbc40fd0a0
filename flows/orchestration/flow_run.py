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
import socket
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
from flows.orchestration.summary import Summary, evaluation, stage_entry
from flows.servers import mlflow_page
from tasks.core import machine
from tasks.core.errors import ContractError, PlumblineError, TrackingError
from tasks.core.files import disk_full_named
from tasks.core.redaction import redact, redact_error
from tasks.core.terminal import command
from tasks.evaluation.scoring import REQUEST_S, ReferenceScorer
from tasks.pipeline.artifact import sweep
from tasks.pipeline.locks import FOREVER, Needs, Patience, devices
from tasks.pipeline.stage import REFERENCE_LOG, Call, Mechanism
from tasks.process.child import PROJECT
from tasks.tracking.tracker import Tracker


@dataclass(frozen=True)
class Host:
    """Environment of a flow: Prefect, or this process alone."""

    run_id: str
    log: Any
    call: Call  # calls the work of a stage, or of what follows the last one
    show: Callable[[str], object]  # shows the table of checks (Markdown) at the end
    tags: Mapping[str, str] = field(default_factory=dict)
    patience: Patience = FOREVER
    page: str = ""  # URL of the flow run's page; empty if nothing serves it


def in_this_process(run_id: str, log: Any, patience: Patience = FOREVER) -> Host:
    """Return a host without Prefect: stages are called directly."""
    return Host(run_id, log, lambda _, work, __: work(log), lambda _: None, patience=patience)


def tracker_of(composed: Composed, *, recorded: bool = True) -> Tracker:
    """Return the MLflow tracker of a configuration; one that drops all if it is not `recorded`."""
    experiment, reports = composed.settings["tracking"]["experiment"], composed.runs / "reports"
    uri = composed.tracking_uri if recorded else ""
    return Tracker(uri, experiment, composed.tracking_root, reports)


def reserve(
    composed: Composed, needs: Needs, patience: Patience
) -> contextlib.AbstractContextManager[None]:
    """Wait until a stage has its GPUs, or the CPUs of a machine without, to itself.

    Stages of other runs in the folder wait for it, and nothing else does: preparing data goes on.
    Raises BusyError.
    """
    if needs is Needs.NOTHING:
        return contextlib.nullcontext()
    return devices(composed.runs, device_names(composed, needs), patience)


def device_names(composed: Composed, needs: Needs) -> list[str]:
    """Return the devices that a stage of a run computes on: `GPU-<UUID>`, or `cpu-<host>`."""
    train, rollout, smoke = (composed.settings.get(k, {}) for k in ("train", "rollout", "smoke"))
    ranks, engine = train.get("nproc", 1), smoke.get("tensor_parallel", 1)
    if rollout.get("engine") == "server":
        ranks += rollout["servers"] * rollout["tensor_parallel"]
    count = {Needs.NOTHING: 0, Needs.DEVICE: 1, Needs.RANKS: ranks, Needs.ENGINE: engine}[needs]
    if count and machine.has_gpu(train.get("device", "auto")):
        return [gpu.uuid for gpu in machine.gpus()[:count]]
    return [f"cpu-{socket.gethostname()}"][:count]


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
    has_page: bool = True  # False for a run that measures nothing: there is nothing to plot
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
        has_page: bool = True,
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
            summary.command = f"{command(flow)} {shlex.join(overrides)}"
        return cls(composed, host, mechanism, summary, run_id, record, has_page)

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
                with full_disk(), tracker.flow(title, settings, text, self._tags()):
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
        elif isinstance(error, Exception):
            redact_error(error)
            summary.error, summary.exit_status = redact(f"{type(error).__name__}: {error}"), 1
        else:
            status, summary.error = "cancelled", "interrupted"
            # Our signal handlers raise the status; Prefect has an error of its own for SIGTERM.
            ours = isinstance(error, KeyboardInterrupt | SystemExit) and error.args
            summary.exit_status = error.args[0] if ours else 143
        try:
            self._end(status)
        except OSError as problem:  # a full disk must not hide the error of the run
            self.host.log.warning("the summary of this run could not be written: %s", problem)

    def _tags(self) -> dict[str, str]:
        flow, exp, page = self.summary.flow, self.summary.exp, self.host.page
        known = {"prefect.flow_run_url": page, "exp": exp or ""}
        return {
            "flow": flow,
            "mlflow.source.name": f"flows/{flow}.py",
            **provenance(),
            **self.tags,
            **self.host.tags,
            **{name: text for name, text in known.items() if text},
        }

    def _find_pages(self) -> None:
        """Note MLflow's id of this run, once it has the run, and the pages there and in Prefect."""
        known = {"prefect": self.host.page}
        self.summary.mlflow_run_id = self.mechanism.tracker.run_id or None
        if page := self.mechanism.tracker.page:
            uri = self.composed.settings["tracking"]["uri"]
            known["mlflow"] = mlflow_page(self.composed.runs, uri, page)
        self.summary.pages |= {name: page for name, page in known.items() if page}

    def _end(self, status: str) -> None:
        """Write the summary to disk, to Prefect and to the tracker."""
        summary, results, tracker = self.summary, self.mechanism.results, self.mechanism.tracker
        summary.status = status
        summary.seconds = round(time.monotonic() - self.started, 1)
        if status == "completed":
            summary.exit_status = TrackingError.exit_code if summary.unregistered else 0
        summary.eval = evaluation(results)
        summary.stages = summary.stages or [stage_entry(result) for result in results]
        for result in results:
            if "peak_memory" in result.metrics:
                peak = int(result.metrics["peak_memory"])
                summary.memory.setdefault(result.name, {})["peak"] = peak
        interrupted = status == "cancelled"  # a process that has seconds left: no request
        if not interrupted:
            self._find_pages()
            summary.tracking = tracker.settle() or None
        texts = {"config.yaml": self.composed.text}
        written = summary.write(self.composed.runs, self.run_id, texts)
        report = None
        if self.has_page:
            from flows.report.page import write_report

            report = write_report(self.composed.runs, self.run_id, self.host.log)
        if interrupted:
            return
        self.host.show(summary.markdown(report))
        numbers = {f"eval/{k}": v for k, v in summary.eval.items() if v is not None}
        files = {"summary.json": written.read_text()}
        if report is not None:
            files[report.name] = report.read_text()
        numbers["seconds"] = summary.seconds
        tracker.log_parent(numbers, files, summary.markdown())
