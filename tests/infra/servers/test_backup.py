"""Back up and restore a folder of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from sqlalchemy import create_engine, text

from infra.servers.backup import LABEL, backup, main, restore
from tasks.core.errors import ArtifactError, ConfigError
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


def test_a_later_backup_adds_what_is_new(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert "artifacts 1, of which 1 are new" in "\n".join(backup(runs, copy))
    before = (copy / "runs/artifacts/served/first/weights.bin").stat().st_ino
    made_artifact(runs, "second")
    assert "artifacts 2, of which 1 are new" in "\n".join(backup(runs, copy))
    assert (copy / "runs/artifacts/served/first/weights.bin").stat().st_ino == before
    assert copy.stat().st_mode & 0o077 == 0


def test_damaged_artifacts_are_named_and_left_out(runs: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    (made_artifact(runs, "second").path / "weights.bin").write_text("sec0nd")
    with pytest.raises(ArtifactError) as damaged:
        backup(runs, copy)
    assert damaged.value.details == ("artifacts/served/second: weights.bin: contents changed",)
    (copy / "runs/artifacts/served/first/weights.bin").write_text("f1rst")
    with pytest.raises(ArtifactError) as damaged:
        restore(copy, tmp_path / "new")
    assert "artifacts/served/first" in damaged.value.details[0]
    assert (tmp_path / "new" / "mlflow" / "mlflow.db").is_file()
    assert list((tmp_path / "new" / "artifacts" / "served").iterdir()) == []


def test_refused(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLUMBLINE_RUNS", str(runs))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, named in (
        (["backup", ""], "TO=<folder>"),
        (["backup", str(runs / "copy")], str(runs / "copy")),
        (["backup", str(tmp_path / "full")], str(tmp_path / "full")),
        (["restore", str(tmp_path / "full")], LABEL),
    ):
        assert main(words) == 2
        assert named in capsys.readouterr().err
    assert main(["backup", str(tmp_path / "copy")]) == 0
    assert main(["restore", str(tmp_path / "copy")]) == 2, "the folder is not empty"
    (runs / "services" / "databases.json").write_text(json.dumps({"mlflow": "postgresql://db/m"}))
    with pytest.raises(ConfigError, match="postgresql://db/m"):
        backup(runs, tmp_path / "copy")
