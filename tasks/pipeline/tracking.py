"""Record flows and stages in MLflow, through a journal on disk (`journal.py`, `outbox.py`).

The flow opens one parent run and one child run per stage, and closes all of them. Recording never
raises and never waits for a server: a run goes on if MLflow is gone, and the next run delivers what
is left.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.errors import PlumblineError, TrackingError
from tasks.core.redaction import redact
from tasks.drift.verdict import NAMES as PRINTS
from tasks.pipeline.artifact import MANIFEST, Artifact, Origin
from tasks.pipeline.event_files import EventFile
from tasks.pipeline.journal import now
from tasks.pipeline.metric_plots import draw
from tasks.pipeline.mlflow_server import Server
from tasks.pipeline.outbox import Outbox, RefusedError, UnreachableError
from tasks.pipeline.report import Registered, RegisteredModel

_NAME = re.compile(r"[^A-Za-z0-9_\-./: ]+")
_VALUE_LIMIT = 500
_NOTE_LIMIT = 8000
"""Longest text of a tag in characters; MLflow would cut it in the middle of a word."""
_FLUSH_EVERY_S = 2.0
_DELIVER_S = 60.0
"""Time limit of a delivery if a server answers. If it does not, one attempt is made."""
_INTERRUPTED_S = 5.0
"""The same after Ctrl-C or SIGTERM, when a process has seconds left."""


def _note(text: str) -> str:
    """Cut a description to the length of a tag, at the end of a line."""
    if len(text) <= _NOTE_LIMIT:
        return text
    more = "\n\n... and more, in the artifacts of this run\n"
    return text[: _NOTE_LIMIT - len(more)].rpartition("\n")[0] + more


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested configuration as MLflow parameters: `train.lr` -> "0.0002".

    Passwords in URLs are left out.
    """
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[_NAME.sub("_", name)] = redact(str(value))[:_VALUE_LIMIT]
    return flat


class StageRun:
    """MLflow run of one stage, a `StageRecord`.

    Args:
        outbox: journal of the flow.
        local_id: our id of the run.
        event_file: TensorBoard's event file; None for none.
    """

    def __init__(self, outbox: Outbox, local_id: str, event_file: EventFile | None = None) -> None:
        self._outbox, self._id, self._event_file = outbox, local_id, event_file
        self._tables: dict[str, list[Mapping[str, Any]]] = {}
        self._series: dict[str, list[tuple[int, float]]] = {}
        self._flushed = time.monotonic()

    @property
    def run_id(self) -> str:
        """MLflow's id of the run; empty if MLflow has not got it yet."""
        return self._outbox.run_id(self._id)

    def metrics(self, values: Mapping[str, float], step: int = 0, at: int | None = None) -> None:
        """Log numbers of a step, at a time in milliseconds; NaN is left out."""
        at = now() if at is None else at
        numbers = {
            _NAME.sub("_", name): float(value)
            for name, value in values.items()
            if value is not None and not math.isnan(float(value))
        }
        if numbers:
            self._outbox.put(do="metrics", run=self._id, values=numbers, step=step, at=at)
        for name, value in values.items():
            if name.startswith("train/"):
                self._series.setdefault(name.removeprefix("train/"), []).append((step, value))
        if self._event_file is not None:
            self._event_file.scalars(values, step, at / 1000)
            if time.monotonic() - self._flushed > _FLUSH_EVERY_S:
                self._event_file.flush()
                self._flushed = time.monotonic()

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to a table, which is logged when the stage ends."""
        self._tables.setdefault(name, []).extend(rows)

    def text(self, name: str, text: str) -> None:
        """Log a small text file."""
        self._outbox.put_file(self._id, name, lambda path: path.write_text(text))

    def tags(self, tags: Mapping[str, object]) -> None:
        """Set tags."""
        texts = {key: str(value) for key, value in tags.items()}
        self._outbox.put(do="tags", run=self._id, tags=texts, at=now())

    def _log_tables_and_plots(self) -> None:
        for name, rows in self._tables.items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            data = [[row.get(column) for column in columns] for row in rows]
            # The format of MLflow's `log_table`, which would import pandas for one call.
            self.text(f"{name}.json", json.dumps({"columns": columns, "data": data}, indent=2))
            tag = [{"path": f"{name}.json", "type": "table"}]
            self.tags({"mlflow.loggedArtifacts": json.dumps(tag)})
        self._outbox.put_file(self._id, "curves.png", partial(draw, self._series))

    def contract(self, verdicts: list[dict[str, Any]]) -> None:
        """Log the checks, failed or not: name, expected, found, verdict."""
        self.text("contract.json", json.dumps(verdicts, indent=1))
        failed = sum(not verdict["ok"] for verdict in verdicts)
        self.metrics({"contract/checked": len(verdicts), "contract/failed": failed})

    def details(self, notes: Mapping[str, Any]) -> None:
        """Log the notes of the stage, its drift among them."""
        self.text("notes.json", json.dumps(notes, indent=1, default=str))

    def finish(self, artifact: Artifact, metrics: Mapping[str, float], *, reused: bool) -> None:
        """Log metrics, drift, path, digest, manifest and fingerprint of the artifact."""
        self.metrics(metrics)
        drift = artifact.notes.get("drift") or {}
        self.metrics({f"drift/{name}": value for name, value in drift.items()})
        self._log_tables_and_plots()
        self.tags({"artifact": artifact.path, "digest": artifact.digest, "reused": reused})
        for name in (MANIFEST, "contract.json", *PRINTS):
            if (artifact.path / name).is_file():
                copy = partial(shutil.copyfile, artifact.path / name)
                self._outbox.put_file(self._id, name, copy)


class Tracker:
    """MLflow runs of one flow, a `FlowTracker`: a parent run, and a child run per stage.

    Args:
        uri: MLflow tracking URI.
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

    @property
    def experiment_id(self) -> str:
        """MLflow's id of the experiment, which is created if it does not exist."""
        return self._server.experiment_id(self._experiment)

    @property
    def run_id(self) -> str:
        """MLflow's id of the parent run; empty if MLflow has not got it yet."""
        run_id: str = self._outbox.run_id(self._id) if self._outbox else ""
        return run_id

    @contextlib.contextmanager
    def flow(
        self, name: str, config: Mapping[str, Any], text: str, tags: Mapping[str, str]
    ) -> Iterator[str]:
        """Open the parent run while the block runs; it ends as FAILED or KILLED if that raises.

        What dead flows have left in the outbox is delivered, and their runs end as KILLED.

        Args:
            name: name of the run.
            config: settings, logged as parameters.
            text: the settings as YAML.
            tags: tags of the run.
        """
        self._outbox = Outbox(self._folder, redact(self.uri), self._server.send)
        limit_s = _DELIVER_S
        try:
            self._id = self._start(name, flatten(config), tags)
            StageRun(self._outbox, self._id).text("config.yaml", text)
            with self._closing(self._id):
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
            try:
                yield StageRun(self._outbox, local_id, event_file)
            finally:
                if event_file is not None:
                    event_file.close()

    def log_parent(
        self, metrics: Mapping[str, float], files: Mapping[str, str], description: str = ""
    ) -> None:
        """Log numbers, small text files and a Markdown description of the whole flow."""
        parent = StageRun(self._outbox, self._id)
        parent.metrics(metrics)
        for name, text in files.items():
            parent.text(name, text)
        parent.tags({"mlflow.note.content": _note(description)})

    def settle(self) -> str:
        """Deliver what waits. Returns a line about what MLflow has not recorded, or nothing."""
        self._outbox.wait(_DELIVER_S)
        report: str = self._outbox.report()
        return report

    def register(self, model: RegisteredModel) -> Registered:
        """Register a served folder as a model version. The version trained last is `candidate`.

        Raises:
            TrackingError: MLflow does not answer; nothing is registered.
            PlumblineError: MLflow refuses the model.
        """
        try:
            if not self._outbox.wait(_DELIVER_S) or not self.run_id:
                raise UnreachableError(self._outbox.problem or "it is too slow")
            return self._server.register(model, self.run_id, self._experiment)
        except UnreachableError as error:
            raise TrackingError(
                f"not registered: MLflow at {redact(self.uri)} does not answer ({error})",
                details=[f"the served model is complete: {model.served.path}"],
                hint="run the same command again when it answers: every finished stage is reused",
            ) from None
        except RefusedError as error:
            raise PlumblineError(f"MLflow refuses to register the model: {error}") from None

    def _start(
        self, name: str, params: Mapping[str, str], tags: Mapping[str, str], parent: str = ""
    ) -> str:
        """Record the start of a run, and return our id of it."""
        local_id = uuid.uuid4().hex
        self._outbox.put(
            do="start", run=local_id, parent=parent, name=name, experiment=self._experiment,
            params=params, tags=dict(tags), at=now(),
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
