"""Record one stage in MLflow: its metrics, tables, files, and the datasets that it reads."""

from __future__ import annotations

import json
import math
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.redaction import redact
from tasks.drift.verdict import NAMES as PRINTS
from tasks.pipeline.artifact import MANIFEST, Artifact
from tasks.tracking.event_files import EventFile
from tasks.tracking.journal import now
from tasks.tracking.outbox import Outbox

_NAME = re.compile(r"[^A-Za-z0-9_\-./: ]+")
_VALUE_LIMIT = 500
_DIGEST_LIMIT = 36
"""Longest digest of a dataset in MLflow."""
_FLUSH_EVERY_S = 2.0


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
        event_file: TensorBoard's event file; None for none.
    """

    def __init__(
        self, outbox: Outbox, local_id: str, event_file: EventFile | None = None,
        datasets: dict[str, dict[str, str]] | None = None,
    ) -> None:  # fmt: skip
        self._outbox, self._id, self._event_file = outbox, local_id, event_file
        self._datasets = {} if datasets is None else datasets
        self._tables: dict[str, list[Mapping[str, Any]]] = {}
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
        self._outbox.put_file(self._id, name, lambda path: path.write_text(redact(text)))

    def tags(self, tags: Mapping[str, object]) -> None:
        """Set tags."""
        texts = {key: redact(str(value)) for key, value in tags.items()}
        self._outbox.put(do="tags", run=self._id, tags=texts, at=now())

    def read(self, digest: str, context: str) -> None:
        """Log a dataset of this flow as an input; other digests are none.

        Args:
            context: what it is read for, "training" or "evaluation".
        """
        if digest in self._datasets:
            dataset = self._datasets[digest]
            self._outbox.put(do="input", run=self._id, context=context, **dataset)

    def _log_tables(self) -> None:
        for name, rows in self._tables.items():
            columns = list(dict.fromkeys(key for row in rows for key in row))
            data = [[row.get(column) for column in columns] for row in rows]
            # The format of MLflow's `log_table`, which would import pandas for one call.
            self.text(f"{name}.json", json.dumps({"columns": columns, "data": data}, indent=2))
            tag = [{"path": f"{name}.json", "type": "table"}]
            self.tags({"mlflow.loggedArtifacts": json.dumps(tag)})

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
        self._log_tables()
        if artifact.kind == "dataset":
            self._datasets[artifact.digest] = dataset_record(artifact)
            self.read(artifact.digest, "training")
        self.tags({"artifact": artifact.path, "digest": artifact.digest, "reused": reused})
        for name in (MANIFEST, "contract.json", *PRINTS):
            if (artifact.path / name).is_file():
                copy = partial(shutil.copyfile, artifact.path / name)
                self._outbox.put_file(self._id, name, copy)


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
