"""`make up` with Debian's PostgreSQL for Prefect and MLflow: a run, a backup, a restore."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg2
import pytest

from tests.infra.servers.site import Site
from tests.infra.servers.test_backup import require_recorded, run_small
from tests.infra.servers.test_daemon import free_port

PREFECT, MLFLOW = "PREFECT_API_DATABASE_CONNECTION_URL", "MLFLOW_BACKEND_STORE_URI"
PASSWORD = "n0t-for-a-l0g"


def bin_folder() -> Path:
    """Return the folder of PostgreSQL's programs; skip the test where they are not installed."""
    places = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))  # Debian's, not on PATH
    program = places[-1] if places else shutil.which("initdb")
    if program is None:
        pytest.skip("no initdb: apt-get install postgresql")
    return Path(program).parent


@contextmanager
def postgres(folder: Path) -> Iterator[dict[str, str]]:
    """Run a server with the databases `prefect` and `mlflow`; yields their URLs without password.

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
        yield {name: f"owner@127.0.0.1:{port}/{name}" for name in ("prefect", "mlflow")}
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


def site_at(runs: Path, places: dict[str, str], programs: Path) -> Site:
    """Return services whose records are in PostgreSQL."""
    site = Site.at(runs)
    prefect, mlflow = (f"owner:{PASSWORD}@{places[name].partition('@')[2]}" for name in places)
    urls = {PREFECT: f"postgresql+asyncpg://{prefect}", MLFLOW: f"postgresql://{mlflow}"}
    return Site(site.services, site.env | urls | {"PATH": f"{programs}:{site.env['PATH']}"})


def with_password(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert files
    return [path for path in files if PASSWORD.encode() in path.read_bytes()]


def module(site: Site, *words: str) -> str:
    done = subprocess.run(
        [*words], env=site.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_run_a_backup_and_a_restore(tmp_path: Path) -> None:
    programs, printed = bin_folder(), ""
    with postgres(tmp_path / "pg") as places, postgres(tmp_path / "pg2") as fresh:
        old = site_at(tmp_path / "old", places, programs)
        new = site_at(tmp_path / "new", fresh, programs)
        make = ["make", "--no-print-directory", "-o", "setup"]
        try:
            printed += old.require("up") + old.require("deploy")
            summary = run_small(old.services.runs)  # without any variable of PostgreSQL
            served = Path(summary["served"])
            require_recorded(old, summary, served)
            audit = old.finished_run(old.start_run("audit-registry", []))
            assert audit["state_type"] == "COMPLETED", audit["state"]
            assert list(old.services.runs.rglob("*.db")) == []
            printed += module(old, *make, "backup", f"TO={tmp_path / 'copy'}")
        finally:
            printed += old.command("down").stdout
        printed += module(new, *make, "restore", f"FROM={tmp_path / 'copy'}")
        try:
            printed += new.require("up")
            require_recorded(new, summary, new.services.runs / served.relative_to(tmp_path / "old"))
        finally:
            printed += new.command("down").stdout
    for folder in ("old", "new", "copy"):
        assert with_password(tmp_path / folder) == []
    assert PASSWORD not in printed
