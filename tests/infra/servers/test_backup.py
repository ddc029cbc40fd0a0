"""Back up a folder of runs, lose it, restore it elsewhere, and go on there."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from sqlalchemy import create_engine, text

from infra.servers.backup import LABEL, backup, main, restore
from tasks.core.errors import ArtifactError, ConfigError
from tasks.pipeline.artifact import Origin, open_artifact, publish, verify
from tasks.pipeline.report import RegisteredModel
from tasks.tracking.journal import left_behind, new_journal
from tasks.tracking.mlflow_server import Server
from tests.commands import command, environment, summary_of
from tests.infra.servers.site import Site

SMALL = (
    "+exp=sft_qlora", "train.max_steps=4", "model.steps=20", "smoke.engine=transformers",
    "smoke.eval_samples=4", "smoke.min_stop_rate=0", "smoke.max_degenerate_rate=1",
    "gate.min_eval_gain=null",
)  # fmt: skip
"""A whole run that is over soon."""


def run_small(runs: Path) -> dict[str, Any]:
    """Run a small chain on a terminal that knows nothing of Prefect and MLflow."""
    done = subprocess.run(
        command("rlhf", *SMALL, f"paths.runs={runs}"),
        env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return summary_of(runs)


def flow_runs(site: Site) -> set[str]:
    """Return the ids of the finished flow runs that Prefect's pages list."""
    query = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}}
    return {run["id"] for run in site.services.prefect.post("/flow_runs/filter", query)}


def require_recorded(site: Site, summary: dict[str, Any], served: Path) -> None:
    """Assert that both servers know a run, and that `models:/` leads to a proved folder."""
    client = MlflowClient(site.services.mlflow.url, site.services.mlflow.url)
    tracked = client.get_run(summary["mlflow_run_id"])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags["prefect.flow_run_id"] in flow_runs(site)
    config = client.download_artifacts(tracked.info.run_id, "config.yaml")
    assert "objective: sft" in Path(config).read_text()
    version = client.get_model_version_by_alias("plumbline", "candidate")
    assert Path(version.tags["path"]) == served
    artifact = open_artifact(served, "served")
    assert artifact.digest == version.tags["digest"]
    assert verify(artifact) == []


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_everything_is_there_after_a_restore(tmp_path: Path) -> None:
    old, new, copy = Site.at(tmp_path / "old"), Site.at(tmp_path / "new"), tmp_path / "backup"
    try:
        old.require("up")
        summary = run_small(old.services.runs)
        done = subprocess.run(
            ["make", "--no-print-directory", "-o", "setup", "backup", f"TO={copy}"],
            env=old.env, text=True, capture_output=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        login = old.services.auth
    finally:
        old.command("down")
    shutil.rmtree(old.services.runs)
    done = subprocess.run(
        ["make", "--no-print-directory", "-o", "setup", "restore", f"FROM={copy}"],
        env=new.env, text=True, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        new.require("up")
        assert new.services.auth == login
        served = new.services.runs / Path(summary["served"]).relative_to(old.services.runs)
        require_recorded(new, summary, served)
        again = run_small(new.services.runs)
        assert [stage["name"] for stage in again["stages"] if not stage["reused"]] == ["register"]
        assert again["gate"]["version"] == summary["gate"]["version"]
        assert again["served"] == str(served)
    finally:
        new.command("down")
    left = [path for path in (copy / "runs/services").iterdir() if path.name != "prefect.env"]
    assert [path.name for path in left] == ["databases.json"]
    assert not old.services.runs.exists()


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
