"""The databases of Prefect and MLflow: SQLite under the folder of runs, or PostgreSQL.

    PREFECT_API_DATABASE_CONNECTION_URL   postgresql+asyncpg://prefect@host/prefect
    MLFLOW_BACKEND_STORE_URI              postgresql://mlflow@host/mlflow

Without a variable a server has SQLite. `make up` passes each variable to its own server and to no
other process. A password may be part of the URL, or in ~/.pgpass, which both servers read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from tasks.core.errors import ConfigError
from tasks.core.redaction import redact

VARIABLES: Mapping[str, tuple[str, ...]] = {
    "prefect": ("PREFECT_API_DATABASE_CONNECTION_URL", "PREFECT_SERVER_DATABASE_CONNECTION_URL"),
    "mlflow": ("MLFLOW_BACKEND_STORE_URI",),
}
"""Variables that name the database of a server."""
RECORD = "databases.json"


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
    """Write the databases of the servers to `databases.json` in `home`, without passwords.

    Raises:
        ConfigError: a server had another database here, and its variable is not set now. It would
            start with an empty one.
    """
    now = {server: redact(url_of(server)) for server in VARIABLES}
    for server, before in _known(home).items():
        if before and not now[server]:
            raise ConfigError(
                f"the records of {server} for this folder are in {before}, and "
                f"{VARIABLES[server][0]} is not set",
                hint=f"set it, or remove {home / RECORD} to go on with SQLite",
            )
    (home / RECORD).write_text(json.dumps(now, indent=1) + "\n")


def _known(home: Path) -> dict[str, str]:
    """Return the databases that the servers of a folder had last, by server."""
    try:
        databases: dict[str, str] = json.loads((home / RECORD).read_text())
    except FileNotFoundError:
        return {}
    return databases
