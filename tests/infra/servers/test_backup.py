"""Back up and restore a folder of runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from sqlalchemy import create_engine, text

from infra.servers.backup import backup, restore
from tasks.pipeline.artifact import Origin, publish
from tasks.pipeline.report import RegisteredModel
from tasks.tracking.journal import left_behind, new_journal
from tasks.tracking.mlflow_server import Server


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """A folder with an artifact, a registered version, an unsent record and a staging folder."""
    runs = tmp_path / "runs"
    made = made_artifact(runs, "first")
    uri = f"sqlite:///{runs / 'mlflow' / 'mlflow.db'}"
    (runs / "mlflow").mkdir()
    server = Server(uri, runs / "mlflow" / "artifacts")
    client = MlflowClient(uri, uri)
    run = client.create_run(server.experiment_id("plumbline"))
    client.log_param(run.info.run_id, "paths.runs", str(runs))
    model = RegisteredModel("plumbline", made, "2026-03-01T10:00:00+00:00")
    server.register(model, run.info.run_id, "plumbline")
    journal = new_journal(runs / "mlflow" / "outbox", uri)
    journal.append({"do": "start", "run": "r1", "at": 1})
    journal.delivered(journal.folder.joinpath("journal.jsonl").stat().st_size)
    journal.append({"do": "tags", "run": "r1", "tags": {"late": "yes"}})
    (runs / "artifacts" / "served" / ".second.tmp").mkdir()
    (runs / "services").mkdir()
    (runs / "services" / "worker.json").write_text("{}")
    yield runs
    journal._file.close()


def made_artifact(runs: Path, key: str) -> Any:
    work = runs / "artifacts" / "served" / f".{key}"
    work.mkdir(parents=True)
    (work / "weights.bin").write_text(key)
    return publish(work, work.with_name(key), Origin("served", "convert", key))


@pytest.mark.slow
def test_paths_and_waiting_records_move_along(runs: Path, tmp_path: Path) -> None:
    backup(runs, tmp_path / "copy")
    elsewhere = tmp_path / "else where"
    restore(tmp_path / "copy", elsewhere)
    uri = f"sqlite:///{elsewhere / 'mlflow' / 'mlflow.db'}"
    (version,) = Server(uri, None).versions()
    assert Path(version.path) == elsewhere / "artifacts" / "served" / "first"
    (journal,) = left_behind(elsewhere / "mlflow" / "outbox", uri)
    first = next(journal.batches())[0]
    assert [record["do"] for record in first] == ["tags"]
    journal.close()
    with create_engine(uri).connect() as connection:
        (root,) = connection.execute(
            text("select artifact_location from experiments where name = 'plumbline'")
        ).one()
        assert root == (elsewhere / "mlflow" / "artifacts").as_uri()
        assert connection.execute(text("select value from params")).one() == (str(runs),)
    names = {path.name for path in (elsewhere / "artifacts" / "served").iterdir()}
    assert names == {"first"}
    assert not (elsewhere / "services" / "worker.json").exists()
