"""A run, a backup, a restore elsewhere, with SQLite and with Debian's PostgreSQL."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psycopg2
import pytest
from mlflow import MlflowClient

from tasks.pipeline.artifact import open_artifact, verify
from tests.commands import command, environment, summary_of
from tests.infra.servers.site import Site
from tests.infra.servers.test_daemon import free_port

PASSWORD = "n0t-for-a-l0g"
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


def bin_folder() -> Path:
    """Return the folder of PostgreSQL's programs; skip the test where they are not installed."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))  # Debian's, not on PATH
    program = places[-1] if places else shutil.which("initdb")
    if program is None:
        pytest.skip("no initdb: apt-get install postgresql")
    return Path(program).parent


@contextmanager
def postgres(folder: Path) -> Iterator[dict[str, str]]:
    """Run a server with two databases; yields the variables that name them.

    A server refuses to run as root, so root gives it the user `postgres`.
    """
    programs, port = bin_folder(), free_port()
    user = pwd.getpwnam("postgres") if os.getuid() == 0 else None
    ids = {"user": user.pw_uid, "group": user.pw_gid} if user else {}
    folder.mkdir(mode=0o700)
    password = folder / "password"
    password.write_text(PASSWORD)
    for path in (folder, password):
        if user:
            os.chown(path, user.pw_uid, user.pw_gid)
    for parent in folder.parents:  # pytest's folders are for root alone
        if user and parent.stat().st_uid == 0 and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o011)
    data = folder / "data"
    flags = ["--username=owner", f"--pwfile={password}", "--auth=scram-sha-256", "--no-sync"]
    subprocess.run(
        [programs / "initdb", f"--pgdata={data}", *flags],
        check=True, capture_output=True, cwd=folder, extra_groups=[] if user else None, **ids,
    )  # fmt: skip
    log = (folder / "log").open("wb")
    server = subprocess.Popen(
        [programs / "postgres", "-D", data, "-p", str(port), "-c", "listen_addresses=127.0.0.1"]
        + ["-k", folder, "-c", "fsync=off"],
        cwd=folder, stdout=log, stderr=log, extra_groups=[] if user else None, **ids,
    )  # fmt: skip
    try:
        _create(port, "prefect", "mlflow")
        place = f"owner:{PASSWORD}@127.0.0.1:{port}"
        yield {
            "PREFECT_API_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{place}/prefect",
            "MLFLOW_BACKEND_STORE_URI": f"postgresql://{place}/mlflow",
            "PATH": f"{programs}:{os.environ['PATH']}",
        }
    finally:
        server.terminate()
        server.wait(60)
        log.close()


def _create(port: int, *databases: str) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            connection = psycopg2.connect(
                host="127.0.0.1", port=port, user="owner", password=PASSWORD, dbname="postgres"
            )
            break
        except psycopg2.OperationalError:
            assert time.monotonic() < deadline
            time.sleep(0.2)
    connection.autocommit = True
    with connection.cursor() as cursor:
        for name in databases:
            cursor.execute(f"create database {name}")
    connection.close()


def require_recorded(site: Site, summary: dict[str, Any], served: Path) -> None:
    """Assert that both servers know a run, and that `models:/` leads to a proved folder."""
    client = MlflowClient(site.services.mlflow.url, site.services.mlflow.url)
    tracked = client.get_run(summary["mlflow_run_id"])
    assert tracked.info.status == "FINISHED"
    flow_run = site.flow_run(tracked.data.tags["prefect.flow_run_id"])
    assert flow_run["state_type"] == "COMPLETED"
    config = client.download_artifacts(tracked.info.run_id, "config.yaml")
    assert "objective: sft" in Path(config).read_text()
    version = client.get_model_version_by_alias("plumbline", "candidate")
    assert Path(version.tags["path"]) == served
    artifact = open_artifact(served, "served")
    assert artifact.digest == version.tags["digest"]
    assert verify(artifact) == []


def make(site: Site, *words: str) -> str:
    """Run a target of the Makefile. Returns its output."""
    done = subprocess.run(
        ["make", "--no-print-directory", "-o", "setup", *words],
        env=site.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def with_password(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if PASSWORD.encode() in path.read_bytes()]


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_everything_is_there_after_a_restore(database: str, tmp_path: Path) -> None:
    """The run itself knows no variable of the servers; no password is in a file or printed."""
    databases = postgres if database == "postgresql" else lambda _: nullcontext({})
    with databases(tmp_path / "first") as first, databases(tmp_path / "second") as second:
        old, new = Site.at(tmp_path / "old"), Site.at(tmp_path / "new")
        old, new = Site(old.services, old.env | first), Site(new.services, new.env | second)
        try:
            printed = old.require("up") + old.require("deploy")
            summary = run_small(old.services.runs)
            require_recorded(old, summary, Path(summary["served"]))
            assert list(old.services.runs.rglob("*.db")) == [] or database == "sqlite"
            printed += make(old, "backup", f"TO={tmp_path / 'copy'}")
            login = old.services.auth
        finally:
            printed += old.command("down").stdout
        shutil.move(old.services.runs, tmp_path / "lost")
        printed += make(new, "restore", f"FROM={tmp_path / 'copy'}")
        try:
            printed += new.require("up")
            assert new.services.auth == login
            served = new.services.runs / Path(summary["served"]).relative_to(old.services.runs)
            require_recorded(new, summary, served)
            again = run_small(new.services.runs)
            made = [stage["name"] for stage in again["stages"] if not stage["reused"]]
            assert made == ["register"]
            assert again["gate"]["version"] == summary["gate"]["version"]
        finally:
            printed += new.command("down").stdout
    for folder in ("lost", "new", "copy"):
        assert with_password(tmp_path / folder) == []
    assert PASSWORD not in printed
    assert not old.services.runs.exists()
