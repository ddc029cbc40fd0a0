"""The databases of Prefect and MLflow: SQLite under the folder of runs, or PostgreSQL.

    PREFECT_API_DATABASE_CONNECTION_URL   postgresql+asyncpg://prefect@host/prefect
    MLFLOW_BACKEND_STORE_URI              postgresql://mlflow@host/mlflow

Without a variable a server has SQLite. `make up` passes each variable to its own server and to no
other process. A password may be part of the URL, or in ~/.pgpass, which both servers read.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import sqlalchemy

from tasks.core.errors import ArtifactError, ConfigError, PlumblineError
from tasks.core.redaction import redact

VARIABLES: Mapping[str, tuple[str, ...]] = {
    "prefect": ("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL"),
    "mlflow": ("MLFLOW_BACKEND_STORE_URI",),
}
"""Variables that name the database of a server."""
RECORD = "databases.json"
_LARGE = ("params", "metrics", "latest_metrics")
"""Tables of MLflow without paths that are read again: what a run was given, and its numbers."""


def own_database(server: str) -> dict[str, str]:
    """Return the variables with which the user chose a database for a server; empty for SQLite."""
    return {name: os.environ[name] for name in VARIABLES[server] if os.environ.get(name)}


def url_of(server: str) -> str:
    """Return the URL of a server's database; empty for SQLite."""
    return next(iter(own_database(server).values()), "")


def without_databases(env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the URLs of databases, for every process but the servers."""
    names = {name for variables in VARIABLES.values() for name in variables}
    return {name: value for name, value in env.items() if name not in names}


def remember(home: Path) -> None:
    """Write the databases of the servers to `databases.json`, without passwords.

    Args:
        home: folder of the services.

    Raises:
        ConfigError: a server had another database here, and its variable is not set now. It would
            start with an empty one.
    """
    now = {server: redact(url_of(server)) for server in VARIABLES}
    for server, before in known(home).items():
        if before and not now[server]:
            raise ConfigError(
                f"the records of {server} for this folder are in {before}, and "
                f"{VARIABLES[server][0]} is not set",
                hint=f"set it, or remove {home / RECORD} to go on with SQLite",
            )
    (home / RECORD).write_text(json.dumps(now, indent=1) + "\n")


def known(home: Path) -> dict[str, str]:
    """Return the databases that the servers of a folder had last, by server."""
    try:
        databases: dict[str, str] = json.loads((home / RECORD).read_text())
    except FileNotFoundError:
        return {}
    return databases


def copy_sqlite(source: Path, to: Path) -> None:
    """Copy a database that is in use, and check the copy.

    Raises:
        ArtifactError: the copy is damaged, and so is the source.
    """
    to.unlink(missing_ok=True)
    with (
        closing(sqlite3.connect(f"{source.as_uri()}?mode=ro", uri=True)) as live,
        closing(sqlite3.connect(to)) as copy,
    ):
        live.backup(copy)
        (verdict,) = copy.execute("pragma integrity_check").fetchone()
    if verdict != "ok":
        raise ArtifactError(
            f"{source} is damaged: {verdict.splitlines()[0]}",
            hint="docs/runbook.md, a damaged database",
        )


def dump(url: str, to: Path) -> None:
    """Write a PostgreSQL database to a file with `pg_dump`, while it is in use.

    Raises:
        PlumblineError: `pg_dump` failed, or is not installed.
    """
    _postgres(url, "pg_dump", "--format=custom", "--no-owner", f"--file={to}")


def load(url: str, source: Path) -> None:
    """Read a file of `dump` into an empty PostgreSQL database with `pg_restore`.

    Raises:
        PlumblineError: the database is not empty, or `pg_restore` is not installed.
    """
    _postgres(
        url, "pg_restore", "--no-owner", "--exit-on-error", "--single-transaction", str(source)
    )


def _postgres(url: str, program: str, *arguments: str) -> None:
    """Run a program of PostgreSQL; the password is in its environment only."""
    parts = sqlalchemy.make_url(url)
    if not parts.drivername.startswith("postgresql"):
        raise ConfigError(
            f"{parts.drivername}: {program} needs a database of PostgreSQL",
            hint="back up this database with its own program",
        )
    query = {"sslmode" if key == "ssl" else key: value for key, value in parts.query.items()}
    plain = sqlalchemy.URL.create(
        "postgresql", parts.username, None, parts.host, parts.port, parts.database, query
    )
    place = plain.render_as_string()
    password = {"PGPASSWORD": str(parts.password)} if parts.password else {}
    try:
        subprocess.run(
            [program, f"--dbname={place}", *arguments],
            env=os.environ | password,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError:
        raise PlumblineError(
            f"{program} is not installed", hint="apt-get install postgresql-client"
        ) from None
    except subprocess.CalledProcessError as error:
        lines = [line for line in redact(error.stderr).splitlines() if "error: " in line]
        raise PlumblineError(
            f"{program} of {redact(place)} ended with status {error.returncode}",
            details=lines[:5],
            hint="restore into an empty database" if program == "pg_restore" else "",
        ) from None


def move_paths(url: str, moved: Mapping[str, str]) -> None:
    """Rewrite the paths in MLflow's database that lie in a folder which has moved.

    Parameters of runs stay: they say what a run was given.

    Args:
        url: URL of the database.
        moved: new path or URL by old one.
    """
    engine = sqlalchemy.create_engine(url)
    inspector = sqlalchemy.inspect(engine)
    with engine.begin() as connection:
        for name in set(inspector.get_table_names()) - set(_LARGE):
            for column in inspector.get_columns(name):
                if isinstance(column["type"], sqlalchemy.String):
                    for old, new in moved.items():
                        connection.execute(_moving(name, column["name"], old, new))
    engine.dispose()


def move_models(folder: Path, moved: Mapping[str, str]) -> None:
    """Rewrite the paths in the files with which MLflow loads registered models.

    Args:
        folder: MLflow's folder of artifacts.
        moved: new path by old one.
    """
    for path in folder.rglob("served.json"):
        place = json.loads(path.read_text())
        for old, new in moved.items():
            if place["path"].startswith(f"{old}/"):
                place["path"] = new + place["path"][len(old) :]
                path.write_text(json.dumps(place, indent=1) + "\n")
                break


def _moving(table: str, column: str, old: str, new: str) -> sqlalchemy.Update:
    text = sqlalchemy.column(column, sqlalchemy.Text)
    start = sqlalchemy.func.substr(text, 1, len(old) + 1)
    rest = sqlalchemy.func.substr(text, len(old) + 1)
    return (
        sqlalchemy.update(sqlalchemy.table(table, text))
        .where(sqlalchemy.or_(text == old, start == f"{old}/"))
        .values({column: sqlalchemy.literal(new).concat(rest)})
    )
