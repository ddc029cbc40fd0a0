"""`make backup` while a run goes on: what was published, and the databases as they are."""

from __future__ import annotations

import sqlite3
import subprocess
from pathlib import Path

from tasks.pipeline.artifact import Origin, open_artifact, publish, verify
from tests.conftest import PROJECT


def test_a_backup_has_committed_records_and_whole_artifacts(tmp_path: Path) -> None:
    runs, to = tmp_path / "runs", tmp_path / "copy"
    (runs / "mlflow").mkdir(parents=True)
    with sqlite3.connect(runs / "mlflow/mlflow.db") as live:
        live.execute("pragma journal_mode=wal")
        live.execute("create table t (x)")
        live.execute("insert into t values (1)")
        live.commit()  # still in the write-ahead log
        live.execute("insert into t values (2)")
        work = runs / "artifacts/served/.a.tmp"
        work.mkdir(parents=True)
        (work / "weights.bin").write_text("weights")
        publish(work, work.with_name("a"), Origin("served", "convert", "a"))
        (runs / "artifacts/served/.b.tmp").mkdir()
        for _ in range(2):  # the second one replaces the first
            script = PROJECT / "infra/servers/backup.sh"
            subprocess.run([script, runs, to], cwd=PROJECT, check=True)
    with sqlite3.connect(to / "mlflow/mlflow.db") as copy:
        assert copy.execute("select x from t").fetchall() == [(1,)]
    assert [path.name for path in (to / "artifacts/served").iterdir()] == ["a"]
    assert verify(open_artifact(to / "artifacts/served/a")) == []
