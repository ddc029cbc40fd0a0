"""Record flows and stages in MLflow. No other module imports it.

The flow opens one parent run and one child run per stage, and closes all of them. Everything is
logged by explicit run id through `MlflowClient`. The fluent API is not used, because its implicit
run ends with a process or thread and takes its parent along. Weights are never uploaded: a model
version has the path and the digest of the served folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.redaction import redact
from tasks.drift.verdict import NAMES as PRINTS
from tasks.pipeline.artifact import MANIFEST, Artifact, Origin
from tasks.pipeline.event_files import EventFile
from tasks.pipeline.metric_plots import draw

if TYPE_CHECKING:
    from mlflow import MlflowClient

_NAME = re.compile(r"[^A-Za-z0-9_\-./: ]+")
_VALUE_LIMIT = 500
_NOTE_LIMIT = 8000
"""Longest text of a tag in characters; MLflow would cut it in the middle of a word."""
_FLUSH_EVERY_S = 2.0


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


@contextlib.contextmanager
def _fluent_calls_go_to(uri: str) -> Iterator[None]:
    """Let MLflow's fluent API use a server, for a call that `MlflowClient` does not have.

    The variables that MLflow sets are restored, since the next configuration would read them.
    """
    import mlflow

    names = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")
    before = {name: os.environ.get(name) for name in names}
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(None)
        mlflow.set_registry_uri(None)
        for name in names:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


class StageRun:
    """MLflow run of one stage, a `StageRecord`. Metrics are batched, so logging is fast.

    Args:
        client: client of the MLflow server.
        run_id: id of the run.
        event_file: TensorBoard's event file; None for none.
    """

    def __init__(self, client: MlflowClient, run_id: str, event_file: EventFile | None) -> None:
        self.run_id, self._client, self._event_file = run_id, client, event_file
        self._pending: list[Any] = []
        self._tables: dict[str, list[Mapping[str, Any]]] = {}
        self._series: dict[str, list[tuple[int, float]]] = {}
        self._flushed = time.monotonic()

    def metrics(self, values: Mapping[str, float], step: int = 0) -> None:
        """Log numbers of a step; NaN is left out."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        for name, value in values.items():
            if value is not None and not math.isnan(float(value)):
                self._pending.append(Metric(_NAME.sub("_", name), float(value), now, step))
            if name.startswith("train/"):
                self._series.setdefault(name.removeprefix("train/"), []).append((step, value))
        if self._event_file is not None:
            self._event_file.scalars(values, step)
        if time.monotonic() - self._flushed > _FLUSH_EVERY_S:
            self.flush()

    def flush(self) -> None:
        """Send pending metrics."""
        if self._pending:
            self._client.log_batch(self.run_id, metrics=self._pending)
        if self._event_file is not None:
            self._event_file.flush()
        self._pending = []
        self._flushed = time.monotonic()

    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add rows to a table, which is logged when the stage ends."""
        self._tables.setdefault(name, []).extend(rows)

    def _log_tables_and_plots(self) -> None:
        for name, rows in self._tables.items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            data = [[row.get(column) for column in columns] for row in rows]
            # The format of `log_table`, which would import pandas for one call.
            self._client.log_dict(self.run_id, {"columns": columns, "data": data}, f"{name}.json")
            tag = [{"path": f"{name}.json", "type": "table"}]
            self._client.set_tag(self.run_id, "mlflow.loggedArtifacts", json.dumps(tag))
        with tempfile.TemporaryDirectory() as folder:
            plot = Path(folder) / "curves.png"
            if draw(self._series, plot):
                self._client.log_artifact(self.run_id, str(plot))

    def contract(self, verdicts: list[dict[str, Any]]) -> None:
        """Log the checks, failed or not: name, expected, found, verdict."""
        self._client.log_text(self.run_id, json.dumps(verdicts, indent=1), "contract.json")
        failed = sum(not verdict["ok"] for verdict in verdicts)
        self.metrics({"contract/checked": len(verdicts), "contract/failed": failed})

    def details(self, notes: Mapping[str, Any]) -> None:
        """Log the notes of the stage, its drift among them."""
        self._client.log_text(self.run_id, json.dumps(notes, indent=1, default=str), "notes.json")

    def finish(self, artifact: Artifact, metrics: Mapping[str, float], *, reused: bool) -> None:
        """Log metrics, drift, path, digest, manifest and fingerprint of the artifact."""
        self.metrics(metrics)
        drift = artifact.notes.get("drift") or {}
        self.metrics({f"drift/{name}": value for name, value in drift.items()})
        self.flush()
        self._log_tables_and_plots()
        tags = {"artifact": artifact.path, "digest": artifact.digest, "reused": reused}
        for key, value in tags.items():
            self._client.set_tag(self.run_id, key, str(value))
        for name in (MANIFEST, "contract.json", *PRINTS):
            if (artifact.path / name).is_file():
                self._client.log_artifact(self.run_id, str(artifact.path / name))


class Tracker:
    """MLflow runs of one flow, a `FlowTracker`: a parent run, and a child run per stage.

    Args:
        uri: MLflow tracking URI.
        experiment: name of the experiment; created if it does not exist.
        artifact_root: folder for logged files if `uri` is a database; None for a server.
        event_files: folder for TensorBoard's event files, by run and stage; None for none.
    """

    def __init__(
        self, uri: str, experiment: str, artifact_root: Path | None, event_files: Path | None = None
    ) -> None:
        from mlflow import MlflowClient

        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self.uri = uri
        self._event_files = event_files
        self._client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        if known := self._client.get_experiment_by_name(experiment):
            self.experiment_id = known.experiment_id
        else:
            location = artifact_root.resolve().as_uri() if artifact_root else None
            self.experiment_id = self._client.create_experiment(experiment, location)
        self.run_id = ""

    @contextlib.contextmanager
    def flow(
        self, name: str, config: Mapping[str, Any], text: str, tags: Mapping[str, str]
    ) -> Iterator[str]:
        """Open the parent run while the block runs; it ends as FAILED or KILLED if that raises.

        Args:
            name: name of the run.
            config: settings, logged as parameters.
            text: the settings as YAML.
            tags: tags of the run.
        """
        self.run_id = self._create(name, flatten(config), tags)
        self._client.log_text(self.run_id, text, "config.yaml")
        with self._closing(self.run_id):
            yield self.run_id

    @contextlib.contextmanager
    def stage(self, name: str, origin: Origin) -> Iterator[StageRun]:
        """Open a child run for one stage while the block runs."""
        inputs = {f"input.{role}": digest for role, digest in origin.inputs.items()}
        tags = {"mlflow.parentRunId": self.run_id, "stage": name, **inputs}
        run_id = self._create(name, flatten(origin.config), tags)
        folder = self._event_files
        event_file = EventFile(folder / self.run_id / name) if folder else None
        stage_run = StageRun(self._client, run_id, event_file)
        with self._closing(run_id):
            try:
                yield stage_run
            finally:
                stage_run.flush()
                if event_file is not None:
                    event_file.close()

    def log_parent(
        self, metrics: Mapping[str, float], files: Mapping[str, str], description: str = ""
    ) -> None:
        """Log numbers, small text files and a Markdown description of the whole flow."""
        parent = StageRun(self._client, self.run_id, None)
        parent.metrics(metrics)
        parent.flush()
        for name, text in files.items():
            self._client.log_text(self.run_id, text, name)
        self._client.set_tag(self.run_id, "mlflow.note.content", _note(description))

    def register(self, model_name: str, served: Artifact, tags: Mapping[str, str]) -> str:
        """Register the served folder as a model version with the alias `candidate`.

        Nothing is uploaded: an external logged model has path and digest, which works with a
        database and with a server. A version with the same digest is reused.

        Returns:
            The version, as MLflow's `models:/name/version`.
        """
        import mlflow

        if model_name not in {m.name for m in self._client.search_registered_models()}:
            self._client.create_registered_model(model_name)
        every = {"path": str(served.path), "digest": served.digest, **tags}
        versions = self._client.search_model_versions(f"name='{model_name}'")
        wanted = (served.digest, str(served.path))
        known = [
            v.version for v in versions if (v.tags.get("digest"), v.tags.get("path")) == wanted
        ]
        version = known[0] if known else None
        if version is None:
            with _fluent_calls_go_to(self.uri):
                external = mlflow.create_external_model(
                    name=model_name,
                    source_run_id=self.run_id,
                    tags=every,
                    model_type="served-folder",
                    experiment_id=self.experiment_id,
                )
                version = self._client.create_model_version(
                    model_name, external.model_uri, run_id=self.run_id, tags=every,
                    model_id=external.model_id,
                ).version  # fmt: skip
        self._client.set_registered_model_alias(model_name, "candidate", version)
        return f"models:/{model_name}/{version}"

    def _create(self, name: str, params: Mapping[str, str], tags: Mapping[str, str]) -> str:
        """Create a run with these parameters and tags, and return its id."""
        from mlflow.entities import Param

        tags = {"mlflow.runName": name, **tags}
        run = self._client.create_run(self.experiment_id, run_name=name, tags=tags)
        items = [Param(key, value) for key, value in params.items()]
        for start in range(0, len(items), 100):
            self._client.log_batch(run.info.run_id, params=items[start : start + 100])
        run_id: str = run.info.run_id
        return run_id

    @contextlib.contextmanager
    def _closing(self, run_id: str) -> Iterator[None]:
        status = "KILLED"
        try:
            yield
            status = "FINISHED"
        except Exception:
            status = "FAILED"
            raise
        finally:
            self._client.set_terminated(run_id, status)
