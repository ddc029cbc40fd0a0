"""Send records to MLflow and register models. No other module imports MLflow.

Everything is logged by explicit run id through `MlflowClient`. The fluent API is not used, because
its implicit run ends with a process or thread and takes its parent along. Weights are never
uploaded: a model version has the path and the digest of the served folder.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from tasks.core.disk import has_no_space
from tasks.pipeline.journal import Record
from tasks.pipeline.mlflow_errors import errors_of_mlflow
from tasks.pipeline.outbox import RefusedError, UnreachableError
from tasks.pipeline.report import Registered, RegisteredModel

RECORD = "plumbline.record"
"""Tag with our id of a run, by which a run is found that MLflow created but did not confirm."""
TRAINED_AT = "trained_at"
"""Tag of a model version with the end of its training, which decides about `candidate`."""
REQUESTS = {
    # The outbox repeats what has failed. MLflow's own 7 retries take minutes, and would create a
    # run twice if only the answer was lost.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


@dataclass(frozen=True)
class Version:
    """A registered model version.

    Attributes:
        model: name of the registered model.
        number: its number.
        aliases: aliases that point to it.
        path: the served folder; empty if another program has registered the version.
        digest: digest of its manifest, likewise.
    """

    model: str
    number: int
    aliases: tuple[str, ...]
    path: str
    digest: str

    @property
    def name(self) -> str:
        """Model and number, e.g. `plumbline/3`."""
        return f"{self.model}/{self.number}"


class Server:
    """MLflow at a tracking URI.

    Args:
        uri: MLflow tracking URI.
        artifact_root: folder for logged files if `uri` is a database; None for a server.
    """

    def __init__(self, uri: str, artifact_root: Path | None) -> None:
        for name, value in REQUESTS.items():
            os.environ.setdefault(name, value)
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self.uri, self._artifact_root = uri, artifact_root
        self._experiments: dict[str, str] = {}

    @cached_property
    def _client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def experiment_id(self, name: str) -> str:
        """Return the id of an experiment, which is created if it does not exist."""
        if name not in self._experiments:
            self._require_space()
            known = self._client.get_experiment_by_name(name)
            root = self._artifact_root
            location = root.resolve().as_uri() if root else None
            created = known.experiment_id if known else None
            self._experiments[name] = created or self._client.create_experiment(name, location)
        return self._experiments[name]

    def _require_space(self) -> None:
        """Raise UnreachableError on a full disk: MLflow would try its database for 100 s."""
        if self._artifact_root is not None and has_no_space(self._artifact_root):
            raise UnreachableError("the disk is full")

    def send(self, records: list[Record], runs: dict[str, str], folder: Path) -> None:
        """Send the records of one run; see `tasks.pipeline.outbox.Send`.

        Raises:
            UnreachableError: MLflow does not answer.
            RefusedError: MLflow refuses the records.
        """
        first = records[0]
        self._require_space()
        with errors_of_mlflow():
            if first["do"] == "start":
                runs[first["run"]] = self._start(first, runs)
                return
            if first["run"] not in runs:
                raise RefusedError("its run was refused")
            run_id = runs[first["run"]]
            if first["do"] == "metrics":
                self._metrics(run_id, records)
            elif first["do"] == "tags":
                self._log(run_id, tags=first["tags"])
            elif first["do"] == "file":
                parent = str(PurePosixPath(first["path"]).parent)
                place = None if parent == "." else parent
                self._client.log_artifact(run_id, str(folder / first["file"]), place)
            else:
                self._client.set_terminated(run_id, first["status"], end_time=first["at"])

    def _start(self, record: Record, runs: Mapping[str, str]) -> str:
        """Create a run with its parameters and tags, or find it; return its id."""
        experiment = self.experiment_id(record["experiment"])
        tags = {"mlflow.runName": record["name"], RECORD: record["run"], **record["tags"]}
        if record["parent"]:
            tags["mlflow.parentRunId"] = runs.get(record["parent"], "")
        known = self._client.search_runs(
            [experiment], f"tags.`{RECORD}` = '{record['run']}'", max_results=1
        )
        run = known[0] if known else self._client.create_run(
            experiment, start_time=record["at"], tags=tags, run_name=record["name"]
        )  # fmt: skip
        run_id: str = run.info.run_id
        params = list(record["params"].items())
        for start in range(0, len(params), 100):
            self._log(run_id, params=dict(params[start : start + 100]))
        return run_id

    def _metrics(self, run_id: str, records: list[Record]) -> None:
        from mlflow.entities import Metric

        metrics = [
            Metric(name, value, record["at"], record["step"])
            for record in records
            for name, value in record["values"].items()
        ]
        self._client.log_batch(run_id, metrics=metrics)

    def _log(
        self, run_id: str, *, params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        from mlflow.entities import Param, RunTag

        self._client.log_batch(
            run_id,
            params=[Param(key, value) for key, value in (params or {}).items()],
            tags=[RunTag(key, value) for key, value in (tags or {}).items()],
        )

    def register(self, model: RegisteredModel, run_id: str, experiment: str) -> Registered:
        """Register the served folder, and let `candidate` name the version trained last.

        Nothing is uploaded: an external logged model has path and digest, which works with a
        database and with a server. A version with the same path and digest is reused.

        Args:
            model: the served folder.
            run_id: MLflow's id of the run that made it.
            experiment: name of the experiment.

        Raises:
            UnreachableError: MLflow does not answer.
            RefusedError: MLflow refuses the model.
        """
        with errors_of_mlflow():
            client, name = self._client, model.name
            wanted = {"path": str(model.served.path), "digest": model.served.digest}
            if not client.search_registered_models(f"name='{name}'"):
                client.create_registered_model(name)
            versions = client.search_model_versions(f"name='{name}'")
            known = [v for v in versions if wanted.items() <= v.tags.items()]
            trained = {int(v.version): _trained_at(v) for v in versions}
            at = model.trained_at
            if known:
                version, recorded = int(known[0].version), known[0].tags.get(TRAINED_AT, "")
                at = max(at, recorded)  # later if the same bytes were trained again
                if at != recorded:
                    client.set_model_version_tag(name, str(version), TRAINED_AT, at)
            else:
                version = self._new_version(model, {**wanted, TRAINED_AT: at}, run_id, experiment)
            trained[version] = _milliseconds(at)
            newest = max(trained, key=lambda number: (trained[number], number))
            client.set_registered_model_alias(name, "candidate", str(newest))
            return Registered(f"models:/{name}/{version}", f"models:/{name}/{newest}")

    def versions(self) -> list[Version]:
        """Return the versions of all registered models, the newest of a model first.

        Raises:
            UnreachableError: MLflow does not answer.
            RefusedError: MLflow refuses the request.
        """
        with errors_of_mlflow():
            listed, token = [], None
            while True:
                page = self._client.search_model_versions(page_token=token)
                listed += page
                token = page.token
                if not token:
                    break
            # Not `version.aliases`: a search leaves them out.
            aliases = {model: self._aliases(model) for model in {v.name for v in listed}}
            listed.sort(key=lambda version: (version.name, -int(version.version)))
            return [
                Version(
                    version.name,
                    int(version.version),
                    aliases[version.name].get(str(version.version), ()),
                    version.tags.get("path", ""),
                    version.tags.get("digest", ""),
                )
                for version in listed
            ]

    def _aliases(self, model: str) -> dict[str, tuple[str, ...]]:
        """Return the aliases of a model's versions, by version number."""
        by_version: dict[str, tuple[str, ...]] = {}
        for alias, version in sorted(self._client.get_registered_model(model).aliases.items()):
            by_version[str(version)] = (*by_version.get(str(version), ()), alias)
        return by_version

    def _new_version(
        self, model: RegisteredModel, tags: Mapping[str, str], run_id: str, experiment: str
    ) -> int:
        """Write a version with an external logged model, and return its number."""
        client, tags = self._client, {**tags, **model.tags}
        logged = client.create_logged_model(
            self.experiment_id(experiment),
            name=model.name,
            source_run_id=run_id,
            tags=tags,
            model_type="served-folder",
        )
        client.finalize_logged_model(logged.model_id, "READY")
        with _fluent_calls_go_to(self.uri):  # it looks the logged model up
            version = client.create_model_version(
                model.name, logged.model_uri, run_id=run_id, tags=tags, description=model.card,
                model_id=logged.model_id,
            )  # fmt: skip
        return int(version.version)


def _milliseconds(time: str) -> float:
    return 1000 * datetime.fromisoformat(time).timestamp()


def _trained_at(version: Any) -> float:
    """Return the end of a version's training; versions without it were trained before they were
    registered."""
    recorded = version.tags.get(TRAINED_AT)
    return _milliseconds(recorded) if recorded else float(version.creation_timestamp)


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
