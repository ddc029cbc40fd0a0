"""Send records to MLflow, and register models. No other module imports MLflow.

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
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tasks.core.files import has_no_space
from tasks.pipeline.artifact import Artifact
from tasks.tracking.outbox import METRICS, Record, RefusedError, UnreachableError, reason

CHAMPION = "champion"
"""Alias of the version that is in use."""
NUMBERS = "numbers"
"""Tag with the numbers of the gate, as JSON."""
EVALUATED_ON = "digest.heldout"
"""Tag with the hash of the evaluation rows."""
GATE = "gate"
"""Tag with the verdict of the gate: `passed`, or the reason of its failure."""
TRAINED_AT = "trained_at"
"""Tag with the end of the training in UTC, ISO 8601, which decides about `candidate`."""
RECORD = "plumbline.record"
"""Tag with our id of a run, by which a run is found that MLflow created but did not confirm."""
REQUESTS = {
    # The outbox repeats what has failed. MLflow's own 7 retries take minutes, and would create a
    # run twice if only the answer was lost.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}

_LATER = (401, 403, 408, 429)
"""Client errors that do not mean that a record is invalid."""
_LOADED_WITH = ("mlflow", "torch", "transformers", "tokenizers", "safetensors", "accelerate")
"""Distributions that load a served folder, next to Plumbline itself."""


@dataclass(frozen=True)
class RegisteredModel:
    """A served model for the registry; `trained_at` is ISO 8601 with an offset, `card` Markdown."""

    name: str
    served: Artifact
    trained_at: str
    tags: Mapping[str, str] = field(default_factory=dict)
    card: str = ""


@dataclass(frozen=True)
class Registered:
    """A version in the registry as `models:/name/version`, and those that two aliases name.

    `candidate` is the version that was trained last; `champion` is empty if that was not moved.
    """

    version: str
    candidate: str
    champion: str = ""


@dataclass(frozen=True)
class Version:
    """A registered model version.

    `path` of the served folder, and `digest` of its manifest, are empty if another program has
    registered the version.
    """

    model: str
    number: int
    aliases: tuple[str, ...]
    path: str
    digest: str
    tags: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Model and number, e.g. `plumbline/3`."""
        return f"{self.model}/{self.number}"

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers of the gate that its run measured."""
        with contextlib.suppress(ValueError):
            return dict(json.loads(self.tags.get(NUMBERS, "{}")))
        return {}

    @property
    def rows(self) -> str:
        """Hash of the evaluation rows of its run; empty if unknown."""
        return self.tags.get(EVALUATED_ON, "")

    @property
    def gate(self) -> str:
        """Verdict of the gate: `passed`, or the reason of its failure; empty if unknown."""
        return self.tags.get(GATE, "")


@contextlib.contextmanager
def _errors_of_mlflow() -> Iterator[None]:
    """Turn any error of MLflow into `UnreachableError` or `RefusedError`, without passwords."""
    try:
        yield
    except (UnreachableError, RefusedError):
        raise
    except Exception as error:
        if hasattr(error, "get_http_status_code"):  # an MlflowException
            status = int(error.get_http_status_code())
        elif (response := getattr(error, "response", None)) is not None:
            status = int(response.status_code)
        else:  # no answer, a database that is gone, or a mistake of ours
            outside = isinstance(error, OSError) or type(error).__module__.startswith("sqlalchemy")
            status = 503 if outside else 400
        text = reason(error)[:300]
        if status >= 500 or status in _LATER:
            raise UnreachableError(text) from None
        raise RefusedError(text) from None


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
        with _errors_of_mlflow():
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
        known = self._client.search_runs([experiment], f"tags.`{RECORD}` = '{run}'", max_results=1)
        if not known:
            all_tags = {RECORD: run, **tags}
            all_tags |= {"mlflow.parentRunId": runs.get(parent, "")} if parent else {}
            known = [self._client.create_run(experiment, at, all_tags, name)]
        run_id: str = known[0].info.run_id
        listed = [Param(key, value) for key, value in params.items()]
        for start in range(0, len(listed), 100):  # MLflow's limit
            self._client.log_batch(run_id, params=listed[start : start + 100])
        return run_id

    def _input(self, run_id: str, dataset: Mapping[str, str]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        tags = [InputTag("mlflow.data.context", "training")]
        made = Dataset(**dataset, source_type="local", schema=None)
        self._client.log_inputs(run_id, [DatasetInput(made, tags)])

    def register(
        self, model: RegisteredModel, run_id: str, experiment: str, *, promote: bool = False
    ) -> Registered:
        """Register the served folder, and let `candidate` name the version trained last.

        A version with the same path and digest is reused: a configuration that is run again from
        the cache registers nothing.
        """
        client, name, at = self._client, model.name, model.trained_at
        wanted = {"path": str(model.served.path), "digest": model.served.digest}
        with _errors_of_mlflow():
            if not client.search_registered_models(f"name='{name}'"):
                client.create_registered_model(name)
            versions = client.search_model_versions(f"name='{name}'")
            trained = {
                int(version.version): version.tags.get(TRAINED_AT, "") for version in versions
            }
            known = [v for v in versions if wanted.items() <= v.tags.items()]
            if known:
                number = int(known[0].version)
                at = max(at, trained[number])  # later if the same bytes were trained again
                measured = (NUMBERS, EVALUATED_ON, GATE)  # the evaluation may be another one
                tags = {tag: value for tag, value in model.tags.items() if tag in measured}
                for tag, value in {**tags, TRAINED_AT: at}.items():
                    client.set_model_version_tag(name, str(number), tag, value)
            else:
                tags = {**model.tags, **wanted, TRAINED_AT: at}
                number = self._new_version(model, tags, run_id, experiment)
            trained[number] = at
            newest = max(trained, key=lambda each: (trained[each], each))
            client.set_registered_model_alias(name, "candidate", str(newest))
            if promote:
                client.set_registered_model_alias(name, CHAMPION, str(number))
        version = f"models:/{name}/{number}"
        return Registered(version, f"models:/{name}/{newest}", version if promote else "")

    def versions(self) -> list[Version]:
        """Return the versions of all registered models, the newest of a model first."""
        listed, token = [], None
        with _errors_of_mlflow():
            while token != "":
                page = self._client.search_model_versions(page_token=token)
                listed += page
                token = page.token or ""
            # A search leaves the aliases out.
            models = {version.name for version in listed}
            aliases = {model: self._client.get_registered_model(model).aliases for model in models}
        versions = []
        for each in listed:
            numbers, tags = aliases[each.name].items(), dict(each.tags)
            own = tuple(sorted(a for a, number in numbers if str(number) == str(each.version)))
            path, digest = tags.get("path", ""), tags.get("digest", "")
            versions.append(Version(each.name, int(each.version), own, path, digest, tags))
        return sorted(versions, key=lambda version: (version.model, -version.number))

    def promote(self, version: Version) -> str:
        """Let the alias `champion` name a version. Returns the number before; empty for none."""
        with _errors_of_mlflow():
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


@contextlib.contextmanager
def _fluent_calls_go_to(uri: str) -> Iterator[None]:
    """Let MLflow's fluent API use a server, for a call that `MlflowClient` does not have.

    MLflow sets variables, which the next configuration would read: they are restored.
    """
    import mlflow

    before = {name: os.environ.get(name) for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI")}
    mlflow.set_tracking_uri(uri)
    mlflow.set_registry_uri(uri)
    try:
        yield
    finally:
        mlflow.set_tracking_uri(None)
        mlflow.set_registry_uri(None)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
