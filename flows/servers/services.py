"""Find the servers that `make up` runs for a folder of runs (`infra/servers/` starts them).

`<runs>/services` has `<name>.json` for each process and `prefect.env`, the settings of Prefect's
clients as a file that a shell can read: `. <runs>/services/prefect.env`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import psutil

from flows.servers.api import Api
from tasks.core.errors import PlumblineError

LOOPBACK = "127.0.0.1"
CLIENT_SETTINGS = "prefect.env"
URL, AUTH, TRACKING = "PREFECT_API_URL", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_URI"


@dataclass(frozen=True)
class Record:
    """Process of a service: id, start time in seconds since the epoch, port."""

    pid: int
    started: float
    port: int | None

    def process(self) -> psutil.Process | None:
        """Return the process; None if it has ended, even if another process has its id now."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            return process if process.create_time() == self.started else None
        except psutil.NoSuchProcess:
            return None


def record_of(name: str, home: Path) -> Record | None:
    """Return the record of a running service; None if it does not run."""
    try:
        record = Record(**json.loads(record_path(name, home).read_text()))
    except (FileNotFoundError, PermissionError):  # another user's are not for us
        return None
    return record if record.process() else None


def record_path(name: str, home: Path) -> Path:
    """Return the file that identifies the process of a service."""
    return home / f"{name}.json"


def services_of(runs: Path) -> Path:
    """Return the folder of the services' records, logs and settings."""
    return runs / "services"


def write_client_settings(home: Path, settings: dict[str, str]) -> Path:
    """Write variables to `prefect.env`, which only its owner can read. Returns the file."""
    path, fresh = home / CLIENT_SETTINGS, home / f".{CLIENT_SETTINGS}"
    lines = [f"export {name}={shlex.quote(value)}" for name, value in settings.items()]
    fresh.unlink(missing_ok=True)
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("# A login: who can read this file can run commands as its owner.\n")
        file.write("\n".join(lines) + "\n")
    fresh.replace(path)
    return path


def client_settings(home: Path) -> dict[str, str]:
    """Return the variables of `prefect.env`; empty if there is no such file."""
    try:
        words = shlex.split((home / CLIENT_SETTINGS).read_text(), comments=True)
    except (FileNotFoundError, PermissionError):
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def running_server(runs: Path) -> dict[str, str]:
    """Return the client settings of the Prefect server of `make up` for a folder of runs.

    MLFLOW_TRACKING_URI is one of them if MLflow has a database of its own. Empty without a server.
    """
    home = services_of(runs)
    record = record_of("prefect", home)
    settings = client_settings(home)
    # The string is sent to our own process only, never to one that has taken its port.
    if record is None or not settings.get(URL, "").endswith(f":{record.port}/api"):
        return {}
    return settings if Api(settings[URL], settings[AUTH]).answers("/admin/version") else {}


def runs_page(mlflow: Api, experiment: str = "plumbline") -> str:
    """Return the URL of the page that lists an experiment's runs; MLflow's front page has none."""
    path = f"/api/2.0/mlflow/experiments/get-by-name?experiment_name={quote(experiment)}"
    answer = mlflow.get(path)  # the experiment is made by its first run
    if answer is None:
        return f"{mlflow.url}/#/experiments"
    number = answer["experiment"]["experiment_id"]
    return f"{mlflow.url}/#/experiments/{number}/runs?workflowType=MACHINE_LEARNING"


def mlflow_page(runs: Path, uri: str | None, page: str) -> str:
    """Return the URL of a page of MLflow; empty if no server is known that has it.

    Without `tracking.uri` it is in the database under `runs`, which `make up` serves.
    """
    if page and uri is not None and uri.startswith(("http://", "https://")):
        server = urlsplit(uri)
        host = server.netloc.rpartition("@")[2]  # without a password
        return f"{server.scheme}://{host}{server.path.rstrip('/')}/{page}"
    record = record_of("mlflow", services_of(runs)) if page and uri is None else None
    return f"http://{LOOPBACK}:{record.port}/{page}" if record else ""


def pages(runs: Path, project: Path, known: Mapping[str, str]) -> str:
    """Return one line: the pages of a run in Prefect and MLflow, or what serves them."""
    if known:
        return f"pages: {'  '.join(known.values())}"
    home = services_of(runs)
    prefect, mlflow = record_of("prefect", home), record_of("mlflow", home)
    urls = [f"http://{LOOPBACK}:{prefect.port}/runs"] if prefect else []
    if mlflow:
        with contextlib.suppress(PlumblineError):
            urls.append(runs_page(Api(f"http://{LOOPBACK}:{mlflow.port}")))
    if urls:
        return f"pages: {'  '.join(urls)}"
    other = [f"paths.runs={runs}"] if runs != project / "runs" else []
    return f"pages: {shlex.join([program(), 'open', *other])}"


def program() -> str:
    """Return how to type `plumbline`: the one of this environment, which may not be on PATH."""
    own = Path(sys.executable).parent / "plumbline"
    if not own.is_file() or shutil.which("plumbline") == str(own):
        return "plumbline"
    here = Path.cwd()
    return str(own.relative_to(here) if own.is_relative_to(here) else own)
