"""Find the servers that `make up` runs for a folder of runs (`infra/services.py`).

`<runs>/services` has `<name>.json` for each process and `prefect.env`, the settings of Prefect's
clients as a file that a shell can read: `. <runs>/services/prefect.env`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

LOOPBACK = "127.0.0.1"
CLIENT_SETTINGS = "prefect.env"
URL, AUTH = "PREFECT_API_URL", "PREFECT_API_AUTH_STRING"


def answers(url: str, path: str = "/health", auth: str = "") -> bool:
    """Return True if a server answers a request; `auth` is `user:password`."""
    import httpx

    user, _, password = auth.partition(":")
    with contextlib.suppress(httpx.HTTPError):
        login = (user, password) if auth else None
        return httpx.get(url + path, auth=login, trust_env=False).is_success
    return False


@dataclass(frozen=True)
class Service:
    """A running process of `make up`, and the port of a server."""

    process: psutil.Process
    port: int | None


def services_of(runs: Path) -> Path:
    """Return the folder of the services' records, logs and settings."""
    return runs / "services"


def running(name: str, home: Path) -> Service | None:
    """Return a service by its record: process id, start time, port; None if it does not run.

    The start time tells it from another process that has got its id later.
    """
    with contextlib.suppress(FileNotFoundError, PermissionError, psutil.NoSuchProcess):
        pid, started, port = json.loads((home / f"{name}.json").read_text())
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE and process.create_time() == started:
            return Service(process, port)
    return None


def client_settings(home: Path) -> dict[str, str]:
    """Return the variables of `prefect.env`; empty if there is no such file."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        words = shlex.split((home / CLIENT_SETTINGS).read_text(), comments=True)
        pairs = (word.partition("=") for word in words if "=" in word)
        return {name: value for name, _, value in pairs}
    return {}


def running_server(runs: Path) -> dict[str, str]:
    """Return the client settings of the Prefect server of `make up`; empty without a server."""
    home = services_of(runs)
    service, settings = running("prefect", home), client_settings(home)
    # The string is sent to our own process only, never to one that has taken its port.
    if service is None or not settings.get(URL, "").endswith(f":{service.port}/api"):
        return {}
    return settings if answers(settings[URL], "/admin/version", settings[AUTH]) else {}


def mlflow_page(runs: Path, uri: str | None, page: str) -> str:
    """Return the URL of a page of MLflow; empty if no server is known that has it.

    Without `tracking.uri` it is in the database under `runs`, which `make up` serves.
    """
    if page and uri is not None and uri.startswith(("http://", "https://")):
        server = urlsplit(uri)
        host = server.netloc.rpartition("@")[2]  # without a password
        return f"{server.scheme}://{host}{server.path.rstrip('/')}/{page}"
    mlflow = running("mlflow", services_of(runs)) if page and uri is None else None
    return f"http://{LOOPBACK}:{mlflow.port}/{page}" if mlflow else ""
