"""Record flows and stages in MLflow, through a journal on disk (`journal.py`, `outbox.py`).

The flow opens one parent run and one child run per stage, and closes all of them. Recording never
raises and never waits for a server: a run goes on if MLflow is gone, and the next run delivers what
is left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import PlumblineError, TrackingError
from tasks.core.redaction import redact, redacted
from tasks.pipeline.artifact import Origin
from tasks.pipeline.report import Registered, RegisteredModel
from tasks.tracking.event_files import EventFile
from tasks.tracking.journal import now
from tasks.tracking.mlflow_registry import CHAMPION, Version
from tasks.tracking.mlflow_server import Server, system_sampler
from tasks.tracking.outbox import Outbox, RefusedError, UnreachableError
from tasks.tracking.stage_run import StageRun as StageRun
from tasks.tracking.stage_run import flatten as flatten

_NOTE_LIMIT = 8000
"""Longest text of a tag in characters; MLflow would cut it in the middle of a word."""
_DELIVER_S = 60.0
"""Time limit of a delivery if a server answers. If it does not, one attempt is made."""
SAMPLE_S = 10.0
"""Seconds between two samples of the machine's load."""
_INTERRUPTED_S = 5.0
"""The same after Ctrl-C or SIGTERM, when a process has seconds left."""


def _note(text: str) -> str:
    """Cut a description to the length of a tag, at the end of a line."""
    if len(text) <= _NOTE_LIMIT:
        return text
    more = "\n\n... and more, in the artifacts of this run\n"
    return text[: _NOTE_LIMIT - len(more)].rpartition("\n")[0] + more


class Tracker:
    """MLflow runs of one flow, a `FlowTracker`: a parent run, and a child run per stage.

    Args:
        experiment: name of the experiment; created if it does not exist.
        artifact_root: folder for logged files if `uri` is a database; None for a server.
        outbox: folder for records that MLflow has not got yet.
        event_files: folder for TensorBoard's event files, by run and stage; None for none.
    """

    def __init__(
        self, uri: str, experiment: str, artifact_root: Path | None, outbox: Path,
        event_files: Path | None = None,
    ) -> None:  # fmt: skip
        self.uri, self._experiment = uri, experiment
        self._folder, self._event_files = outbox, event_files
        self._server = Server(uri, artifact_root)
        self._outbox: Any = None  # an Outbox while `flow` runs
        self._id = ""
        self._datasets: dict[str, dict[str, str]] = {}

    @property
    def experiment_id(self) -> str:
        """MLflow's id of the experiment, which is created if it does not exist."""
        return self._server.experiment_id(self._experiment)

    @property
    def run_id(self) -> str:
        """MLflow's id of the parent run; empty if MLflow has not got it yet."""
        run_id: str = self._outbox.run_id(self._id) if self._outbox else ""
        return run_id

    @property
    def page(self) -> str:
        """Path of the flow's page on MLflow's server; empty if MLflow has not got the run yet."""
        run_id = self.run_id
        return f"#/experiments/{self.experiment_id}/runs/{run_id}" if run_id else ""

    @contextlib.contextmanager
    def flow(
        self, name: str, config: Mapping[str, Any], text: str, tags: Mapping[str, str]
    ) -> Iterator[str]:
        """Open the parent run while the block runs; it ends as FAILED or KILLED if that raises.

        What dead flows have left in the outbox is delivered, and their runs end as KILLED.
        """
        self._outbox = Outbox(self._folder, redact(self.uri), self._server.send)
        limit_s = _DELIVER_S
        try:
            self._id = self._start(name, flatten(config), tags)
            StageRun(self._outbox, self._id).text("config.yaml", text)
            with self._closing(self._id), self._sampled():
                self._outbox.wait(limit_s)
                yield self.run_id
        except Exception:
            raise
        except BaseException:
            limit_s = _INTERRUPTED_S
            raise
        finally:
            self._outbox.close(limit_s)

    @contextlib.contextmanager
    def stage(self, name: str, origin: Origin) -> Iterator[StageRun]:
        """Open a child run for one stage while the block runs."""
        inputs = {f"input.{role}": digest for role, digest in origin.inputs.items()}
        tags = {"stage": name, **inputs}
        local_id = self._start(name, flatten(origin.config), tags, parent=self._id)
        folder = self._event_files
        event_file = EventFile(folder / (self.run_id or self._id) / name) if folder else None
        with self._closing(local_id):
            run = StageRun(self._outbox, local_id, event_file, self._datasets)
            for digest in origin.inputs.values():
                run.read(digest, "training" if origin.kind == "shards" else "evaluation")
            try:
                yield run
            finally:
                if event_file is not None:
                    event_file.close()

    def log_parent(
        self, metrics: Mapping[str, float], files: Mapping[str, str], description: str = ""
    ) -> None:
        """Log numbers, small text files and a Markdown description of the whole flow."""
        parent = StageRun(self._outbox, self._id, datasets=self._datasets)
        parent.metrics(metrics)
        for digest in self._datasets:
            parent.read(digest, "training")
        for name, text in files.items():
            parent.text(name, text)
        parent.tags({"mlflow.note.content": _note(description)})

    def settle(self) -> str:
        """Deliver what waits. Returns a line about what MLflow has not recorded, or nothing."""
        self._outbox.wait(_DELIVER_S)
        report: str = self._outbox.report()
        return report

    def register(self, model: RegisteredModel, *, promote: bool = False) -> Registered:
        """Register a served folder as a model version. The version trained last is `candidate`.

        Args:
            promote: True to let `champion` name the version.

        Raises:
            TrackingError: MLflow does not answer; nothing is registered.
            PlumblineError: MLflow refuses the model.
        """
        with self._registry(f": {model.served.path}"):
            if not self._outbox.wait(_DELIVER_S) or not self.run_id:
                raise UnreachableError(self._outbox.problem or "it is too slow")
            return self._server.register(model, self.run_id, self._experiment, promote=promote)

    def champion(self, name: str) -> Version | None:
        """Return the version of a model that the alias `champion` names; None for none.

        Raises:
            TrackingError: MLflow does not answer.
        """
        with self._registry():
            versions = self._server.versions()
        return next((v for v in versions if v.model == name and CHAMPION in v.aliases), None)

    @contextlib.contextmanager
    def _registry(self, path: str = "") -> Iterator[None]:
        """Raise the errors of the model registry as ours."""
        try:
            yield
        except UnreachableError as error:
            raise TrackingError(
                f"not registered: MLflow at {redact(self.uri)} does not answer ({error})",
                details=[f"the served model is complete{path}"],
                hint="run the same command again when it answers: every finished stage is reused",
            ) from None
        except RefusedError as error:
            raise PlumblineError(f"MLflow refuses to register the model: {error}") from None

    @contextlib.contextmanager
    def _sampled(self) -> Iterator[None]:
        """Record the use of CPU, memory, network and GPUs of this machine while the block runs."""
        end = threading.Event()

        def work() -> None:
            with contextlib.suppress(Exception):  # a sensor is not worth a run
                sample = system_sampler()
                sample()  # the next one counts from here
                pause = 1.0
                for step in itertools.count():
                    if end.wait(pause):
                        return
                    pause, values = SAMPLE_S, sample()
                    self._outbox.put(do="metrics", run=self._id, values=values, step=step, at=now())

        thread = threading.Thread(target=work, name="system metrics", daemon=True)
        if os.environ.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true").lower() != "false":
            thread.start()
        try:
            yield
        finally:
            end.set()
            if thread.is_alive():
                thread.join(1.0)

    def _start(
        self, name: str, params: Mapping[str, str], tags: Mapping[str, str], parent: str = ""
    ) -> str:
        """Record the start of a run, and return our id of it."""
        local_id = uuid.uuid4().hex
        self._outbox.put(
            do="start", run=local_id, parent=parent, name=redact(name),
            experiment=self._experiment, params=params, tags=redacted(dict(tags)), at=now(),
        )  # fmt: skip
        return local_id

    @contextlib.contextmanager
    def _closing(self, local_id: str) -> Iterator[None]:
        status = "KILLED"
        try:
            yield
            status = "FINISHED"
        except Exception:
            status = "FAILED"
            raise
        finally:
            self._outbox.put(do="end", run=local_id, status=status, at=now())
