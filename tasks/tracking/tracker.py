"""Record flows and stages in MLflow.

The flow opens one parent run and one child run per stage, and closes all of them. Recording never
raises: a run goes on if MLflow is gone (`outbox.py`). It waits for a server at the start of a flow,
`_START_S` at most, so that the run's page is known, and at its end.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.errors import PlumblineError, TrackingError
from tasks.core.redaction import redact, redacted
from tasks.drift.verdict import NAMES as PRINTS
from tasks.pipeline.artifact import Artifact, Origin
from tasks.tracking.mlflow_server import CHAMPION, Registered, RegisteredModel, Server, Version
from tasks.tracking.outbox import METRICS, Outbox, RefusedError, UnreachableError
from tasks.weights.files.documents import MANIFEST

_NAME = re.compile(r"[^A-Za-z0-9_\-./: ]+")
_VALUE_LIMIT = 500
_DIGEST_LIMIT = 36
"""Longest digest of a dataset in MLflow."""
_DELIVER_S = 60.0
"""Time limit of a delivery if a server answers. If it does not, one attempt is made."""
_START_S = 10.0
"""The same for a server at the start of a flow; a run that it gets later has its page at last."""
_INTERRUPTED_S = 5.0
"""The same after Ctrl-C or SIGTERM, when a process has seconds left."""


class Tracker:
    """MLflow runs of one flow: a parent run, and a child run per stage.

    `artifact_root` is the folder for logged files if `uri` is a database; in `reports` flows leave
    their numbers in any case. Without a `uri` all records are dropped.
    """

    def __init__(
        self, uri: str, experiment: str, artifact_root: Path | None, reports: Path
    ) -> None:
        self.uri, self._experiment, self._reports = uri, experiment, reports
        self._server = Server(uri, artifact_root)
        self._outbox: Any = None  # an Outbox while `flow` runs
        self._id = ""
        self._is_sampled = False

    @property
    def experiment_id(self) -> str:
        """MLflow's id of the experiment, which is created if it does not exist."""
        return self._server.experiment_id(self._experiment)

    @property
    def run_id(self) -> str:
        """MLflow's id of the parent run; empty if MLflow has not got it yet."""
        return str(self._outbox.runs.get(self._id, "")) if self._outbox else ""

    @property
    def page(self) -> str:
        """Path of the flow's page on MLflow's server; empty if MLflow has not got the run yet."""
        run_id = self.run_id
        return f"#/experiments/{self.experiment_id}/runs/{run_id}" if run_id else ""

    @contextlib.contextmanager
    def flow(
        self, name: str, config: Mapping[str, Any], text: str, tags: Mapping[str, str]
    ) -> Iterator[str]:
        """Open the parent run while the block runs; it ends as FAILED or KILLED if that raises."""
        send = self._server.send if self.uri else None
        self._outbox = Outbox(redact(self.uri), send, self._reports)
        limit_s = _DELIVER_S
        try:
            self._id = self._start(name, flatten(config), tags)
            StageRun(self._outbox, self._id).text("config.yaml", text)
            with self._closing(self._id):
                # A database that is slow does not hang: it may be made now.
                is_server = self.uri.startswith(("http:", "https:"))
                self._outbox.wait(_START_S if is_server else _DELIVER_S)
                self._sample_system()
                yield self.run_id
        except BaseException as error:
            limit_s = _DELIVER_S if isinstance(error, Exception) else _INTERRUPTED_S
            raise
        finally:
            self._outbox.close(limit_s)

    def _sample_system(self) -> None:
        """Let MLflow sample CPU, memory and GPUs, once it has the parent run."""
        if self.run_id and not self._is_sampled:
            self._is_sampled = True
            self._server.sample_system(self.run_id)

    @contextlib.contextmanager
    def stage(self, name: str, origin: Origin) -> Iterator[StageRun]:
        """Open a child run for one stage while the block runs."""
        self._sample_system()
        inputs = {f"input.{role}": digest for role, digest in origin.inputs.items()}
        tags = {"stage": name, **inputs}
        local_id = self._start(name, flatten(origin.config), tags, parent=self._id)
        with self._closing(local_id):
            yield StageRun(self._outbox, local_id, self._id)

    def log_parent(
        self, metrics: Mapping[str, float], files: Mapping[str, str], description: str = ""
    ) -> None:
        """Log numbers, small text files and a Markdown description of the whole flow."""
        parent = StageRun(self._outbox, self._id)
        parent.metrics(metrics)
        for name, text in files.items():
            parent.text(name, text)
        parent.tags({"mlflow.note.content": description})

    def settle(self) -> str:
        """Deliver what waits. Returns a line about what MLflow has not recorded, or nothing."""
        self._outbox.wait(_DELIVER_S)
        return str(self._outbox.report())

    def register(self, model: RegisteredModel, *, promote: bool = False) -> Registered:
        """Register a served folder as a model version. The version trained last is `candidate`.

        Raises TrackingError if MLflow does not answer, PlumblineError if it refuses the model.
        """
        with self._registry(f": {model.served.path}"):
            if not self._outbox.wait(_DELIVER_S) or not self.run_id:
                raise UnreachableError(self._outbox.problem or "it is too slow")
            return self._server.register(model, self.run_id, self._experiment, promote=promote)

    def champion(self, name: str) -> Version | None:
        """Return the version that `champion` names; None for none. Raises TrackingError."""
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

    def _start(
        self, name: str, params: Mapping[str, str], tags: Mapping[str, str], parent: str = ""
    ) -> str:
        """Record the start of a run, and return our id of it."""
        local_id = uuid.uuid4().hex
        start = (self._experiment, redact(name), now(), params, redacted(dict(tags)), parent)
        self._outbox.put("start", local_id, *start)
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
            self._outbox.put("set_terminated", local_id, status, now())


class StageRun:
    """MLflow run of one stage; `parent` is our id of the flow's run, which has the datasets."""

    def __init__(self, outbox: Outbox, local_id: str, parent: str = "") -> None:
        self._outbox, self._id, self._parent = outbox, local_id, parent
        self._tables: dict[str, list[Mapping[str, Any]]] = {}

    @property
    def run_id(self) -> str:
        """MLflow's id of the run; empty if MLflow has not got it yet."""
        return self._outbox.runs.get(self._id, "")

    def metrics(self, values: Mapping[str, float], step: int = 0, at: int | None = None) -> None:
        """Log numbers of a step, at a time in milliseconds; NaN is left out."""
        at = now() if at is None else at
        for name, value in values.items():
            if value is not None and not math.isnan(float(value)):
                name = _NAME.sub("_", name)
                self._outbox.put(METRICS, self._id, name, float(value), at, step)

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to a table, which is logged when the stage ends."""
        self._tables.setdefault(name, []).extend(rows)

    def text(self, name: str, text: str) -> None:
        """Log a small text file."""
        self._outbox.put("log_text", self._id, redact(text), name)

    def tags(self, tags: Mapping[str, object]) -> None:
        """Set tags."""
        for key, value in tags.items():
            self._outbox.put("set_tag", self._id, key, redact(str(value)))

    def contract(self, verdicts: list[dict[str, Any]]) -> None:
        """Log the checks, failed or not: name, expected, found, verdict."""
        self.text("contract.json", json.dumps(verdicts, indent=1))
        failed = sum(not verdict["ok"] for verdict in verdicts)
        self.metrics({"contract/checked": len(verdicts), "contract/failed": failed})

    def finish(self, artifact: Artifact, metrics: Mapping[str, float], *, reused: bool) -> None:
        """Log metrics, drift, path, digest, manifest and fingerprint of the artifact."""
        self.metrics(metrics)
        drift = artifact.notes.get("drift") or {}
        self.metrics({f"drift/{name}": value for name, value in drift.items()})
        for name, rows in self._tables.items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            data = [[row.get(column) for column in columns] for row in rows]
            # The format of MLflow's `log_table`, which would import pandas for one call.
            self.text(f"{name}.json", json.dumps({"columns": columns, "data": data}, indent=2))
            tag = [{"path": f"{name}.json", "type": "table"}]
            self.tags({"mlflow.loggedArtifacts": json.dumps(tag)})
        if artifact.kind == "dataset":
            self._outbox.put("log_inputs", self._parent, dataset_record(artifact))
        self.tags({"artifact": artifact.path, "digest": artifact.digest, "reused": reused})
        for name in (MANIFEST, "contract.json", *PRINTS):
            if (artifact.path / name).is_file():
                self._outbox.put("log_artifact", self._id, str(artifact.path / name))


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return a nested configuration as MLflow parameters, redacted: `train.lr` -> "0.0002"."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{name}.")
        else:
            flat[_NAME.sub("_", name)] = redact(str(value))[:_VALUE_LIMIT]
    return flat


def dataset_record(artifact: Artifact) -> dict[str, str]:
    """Return what MLflow shows of a dataset: name, digest, place and rows."""
    document = artifact.manifest()
    config, splits = document["config"], document["notes"].get("splits", {})
    paths = [source.get("path") for source in config.get("sources") or [config]]
    names = [Path(path).name for path in paths if path] or [str(config.get("kind", "dataset"))]
    return {
        "name": redact("+".join(names))[:_VALUE_LIMIT],
        "digest": artifact.digest[:_DIGEST_LIMIT],
        "source": json.dumps({"uri": str(artifact.path), "digest": artifact.digest}),
        "profile": json.dumps({f"{split}_rows": n.get("kept") for split, n in splits.items()}),
    }


def now() -> int:
    """Return the time in milliseconds, as MLflow counts it."""
    return int(time.time() * 1000)
