"""Send records to MLflow and register models. No other module imports MLflow.

Everything is logged by explicit run id through `MlflowClient`. The fluent API is not used, because
its implicit run ends with a process or thread and takes its parent along. Weights are never
uploaded: a model version has the path and the digest of the served folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tasks.core.disk import has_no_space
from tasks.pipeline.report import Registered, RegisteredModel
from tasks.tracking.mlflow_registry import (
    CHAMPION,
    Version,
    list_versions,
    register_version,
)
from tasks.tracking.outbox import (
    METRICS,
    Record,
    RefusedError,
    UnreachableError,
    errors_of_mlflow,
)

RECORD = "plumbline.record"
"""Tag with our id of a run, by which a run is found that MLflow created but did not confirm."""
REQUESTS = {
    # The outbox repeats what has failed. MLflow's own 7 retries take minutes, and would create a
    # run twice if only the answer was lost.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class Server:
    """MLflow at a tracking URI; a database has its files in `artifact_root`.

    All methods raise UnreachableError if MLflow does not answer, RefusedError if it refuses.
    """

    def __init__(self, uri: str, artifact_root: Path | None) -> None:
        for name, value in REQUESTS.items():
            os.environ.setdefault(name, value)
        for name in ("mlflow.store.db.utils", "alembic", "mlflow.pyfunc"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("mlflow.system_metrics").setLevel(logging.ERROR)
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
            location = self._artifact_root.resolve().as_uri() if self._artifact_root else None
            self._experiments[name] = (
                known.experiment_id if known else self._client.create_experiment(name, location)
            )
        return self._experiments[name]

    def _require_space(self) -> None:
        """Raise UnreachableError on a full disk: MLflow would try its database for 100 s."""
        if self._artifact_root is not None and has_no_space(self._artifact_root):
            raise UnreachableError("the disk is full")

    def send(self, records: list[Record], runs: dict[str, str]) -> None:
        """Send the records of one run; see `tasks.tracking.outbox.Send`."""
        first = records[0]
        self._require_space()
        with errors_of_mlflow():
            if first.call == "start":
                runs[first.run] = self._start(first.run, runs, *first.arguments)
                return
            if first.run not in runs:
                raise RefusedError("its run was refused")
            run_id = runs[first.run]
            if first.call == METRICS:
                from mlflow.entities import Metric

                metrics = [Metric(*record.arguments) for record in records]
                self._client.log_batch(run_id, metrics=metrics)
            elif first.call == "log_inputs":
                self._input(run_id, *first.arguments)
            else:
                getattr(self._client, first.call)(run_id, *first.arguments)

    def sample_system(self, run_id: str) -> None:
        """Let MLflow record the use of CPU, memory, network and GPUs until the run has ended."""
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        if os.environ.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true").lower() != "false":
            SystemMetricsMonitor(run_id, tracking_uri=self.uri).start()

    def _start(
        self,
        run: str,
        runs: Mapping[str, str],
        experiment_name: str,
        name: str,
        at: int,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        parent: str,
    ) -> str:
        """Create a run with its parameters and tags, or find it; return its id."""
        from mlflow.entities import Param

        experiment = self.experiment_id(experiment_name)
        all_tags = {RECORD: run, **tags}
        if parent:
            all_tags["mlflow.parentRunId"] = runs.get(parent, "")
        known = self._client.search_runs([experiment], f"tags.`{RECORD}` = '{run}'", max_results=1)
        created = known[0] if known else self._client.create_run(experiment, at, all_tags, name)
        run_id: str = created.info.run_id
        listed = [Param(key, value) for key, value in params.items()]
        for start in range(0, len(listed), 100):  # MLflow's limit
            self._client.log_batch(run_id, params=listed[start : start + 100])
        return run_id

    def _input(self, run_id: str, context: str, dataset: Mapping[str, str]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        tags = [InputTag("mlflow.data.context", context)]
        made = Dataset(**dataset, source_type="local", schema=None)
        self._client.log_inputs(run_id, [DatasetInput(made, tags)])

    def register(
        self, model: RegisteredModel, run_id: str, experiment: str, *, promote: bool = False
    ) -> Registered:
        """Register the served folder, and let `candidate` name the version trained last."""
        with errors_of_mlflow():
            return register_version(
                self._client,
                model,
                lambda tags: self._new_version(model, tags, run_id, experiment),
                promote=promote,
            )

    def versions(self) -> list[Version]:
        """Return the versions of all registered models, the newest of a model first."""
        with errors_of_mlflow():
            return list_versions(self._client)

    def promote(self, version: Version) -> str:
        """Let the alias `champion` name a version. Returns the number before; empty for none."""
        with errors_of_mlflow():
            aliases = self._client.get_registered_model(version.model).aliases
            self._client.set_registered_model_alias(version.model, CHAMPION, str(version.number))
            return str(aliases.get(CHAMPION, ""))

    def _new_version(
        self, model: RegisteredModel, tags: dict[str, str], run_id: str, experiment: str
    ) -> int:
        """Log the served folder as a pyfunc model, write its version, and return the number."""
        client = self._client
        logged = client.create_logged_model(
            self.experiment_id(experiment), name=model.name, source_run_id=run_id, tags=tags,
            model_type="served-folder",
        )  # fmt: skip
        with TemporaryDirectory() as folder:
            _save_pyfunc(Path(folder) / "model", model, logged)
            client.log_model_artifacts(logged.model_id, str(Path(folder) / "model"))
        client.finalize_logged_model(logged.model_id, "READY")
        with _fluent_calls_go_to(self.uri):  # it looks the logged model up
            created = client.create_model_version(
                model.name, logged.model_uri, run_id=run_id, tags=tags, description=model.card,
                model_id=logged.model_id,
            )  # fmt: skip
        return int(created.version)


def _save_pyfunc(folder: Path, model: RegisteredModel, logged: Any) -> None:
    """Write the files of a pyfunc model that loads the served folder: no weights, no code."""
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types.llm import CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA

    data = folder.parent / "served"
    data.mkdir()
    place = {"path": str(model.served.path), "digest": model.served.digest}
    (data / "served.json").write_text(json.dumps(place, indent=1) + "\n")
    pyfunc.save_model(
        str(folder),
        loader_module="tasks.serving.registered_model",
        data_path=str(data),
        signature=ModelSignature(CHAT_MODEL_INPUT_SCHEMA, CHAT_MODEL_OUTPUT_SCHEMA),
        input_example={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32},
        pip_requirements=[f"{name}=={version(name)}" for name in _LOADED_WITH],
        mlflow_model=Model(model_id=logged.model_id, run_id=logged.source_run_id),
    )


_LOADED_WITH = ("mlflow", "torch", "transformers", "tokenizers", "safetensors", "accelerate")
"""Distributions that load a served folder, next to Plumbline itself."""


@contextlib.contextmanager
def _fluent_calls_go_to(uri: str) -> Iterator[None]:
    """Let MLflow's fluent API use a server, for a call that `MlflowClient` does not have.

    MLflow sets variables, which the next configuration would read: they are restored.
    """
    import mlflow

    before = dict(os.environ)
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(None)
        mlflow.set_registry_uri(None)
        for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
