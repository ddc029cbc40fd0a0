"""Find and ask the servers that `make up` runs for a folder of runs (`infra/servers/`).

`<runs>/services` has `<name>.json` for each process and `prefect.env`, the settings of Prefect's
clients as a file that a shell can read: `. <runs>/services/prefect.env`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import shutil
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from tasks.core.errors import PlumblineError

LOOPBACK = "127.0.0.1"
CLIENT_SETTINGS = "prefect.env"
URL, AUTH = "PREFECT_API_URL", "PREFECT_API_AUTH_STRING"
BUSY, BUSY_PATIENCE_S = 503, 5.0
"""Status of Prefect's server while another of its writers has locked SQLite; seconds to wait."""
ANSWER_S = 30.0


class RefusedError(PlumblineError):
    """A server refused a request."""


@dataclass
class Api:
    """JSON API of a server, without its client; `auth` is the `user:password` of Prefect's."""

    url: str
    auth: str = field(default="", repr=False)
    _csrf: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    def answers(self, path: str = "/health") -> bool:
        """Return True if a GET request succeeds."""
        try:
            return self.get(path) is not None
        except PlumblineError:
            return False

    def get(self, path: str) -> Any:
        """Send a GET request, see `call`."""
        return self.call("GET", path)

    def post(self, path: str, body: Any) -> Any:
        """Send a POST request, see `call`."""
        return self.call("POST", path, body)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request.

        Returns the JSON answer, or the text if it is no JSON; None if the object does not exist.
        Raises RefusedError if the server refused, or stayed busy; PlumblineError without an answer.
        """
        deadline = time.monotonic() + BUSY_PATIENCE_S
        answer = self._send(method, path, body)
        while True:
            if answer.status_code == 403 and "CSRF" in answer.text and not self._csrf:
                # Prefect wants to see this token in every request that changes a thing.
                client = str(uuid.uuid4())
                token = self.get(f"/csrf-token?client={client}")["token"]
                self._csrf = {"Prefect-Csrf-Token": token, "Prefect-Csrf-Client": client}
            elif answer.status_code == BUSY and time.monotonic() < deadline:
                time.sleep(0.2)
            else:
                break
            answer = self._send(method, path, body)
        if answer.status_code == 404:
            return None
        if answer.is_error:
            what = f"{method} {self.url}{path}: status {answer.status_code}"
            raise RefusedError(what, details=[answer.text[:300]])
        try:
            return answer.json() if answer.content else None
        except ValueError:
            return answer.text

    def _send(self, method: str, path: str, body: Any) -> Any:
        import httpx

        user, _, password = self.auth.partition(":")
        try:
            return httpx.request(
                method,
                self.url + path,
                json=body,
                headers=self._csrf,
                auth=(user, password) if self.auth else None,
                timeout=ANSWER_S,
                trust_env=False,  # loopback: no proxy
            )
        except httpx.HTTPError as error:
            raise PlumblineError(f"no answer from {self.url}: {error}") from error


@dataclass(frozen=True)
class Record:
    """Process of a service: id, start time in seconds since the epoch, port.

    The pair identifies the process even if another one gets the same id later.
    """

    pid: int
    started: float
    port: int | None

    def process(self) -> psutil.Process | None:
        """Return the process; None if it has ended."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            alive = process.status() != psutil.STATUS_ZOMBIE
            return process if alive and process.create_time() == self.started else None
        return None


def services_of(runs: Path) -> Path:
    """Return the folder of the services' records, logs and settings."""
    return runs / "services"


def record_of(name: str, home: Path) -> Record | None:
    """Return the record of a running service; None if it does not run."""
    try:
        record = Record(**json.loads((home / f"{name}.json").read_text()))
    except (FileNotFoundError, PermissionError):  # another user's are not for us
        return None
    return record if record.process() else None


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
    record, settings = record_of("prefect", home), client_settings(home)
    # The string is sent to our own process only, never to one that has taken its port.
    if record is None or not settings.get(URL, "").endswith(f":{record.port}/api"):
        return {}
    return settings if Api(settings[URL], settings[AUTH]).answers("/admin/version") else {}


def mlflow_of(runs: Path) -> str:
    """Return the address of the MLflow server of `make up`; empty without one."""
    record = record_of("mlflow", services_of(runs))
    return f"http://{LOOPBACK}:{record.port}" if record else ""


def mlflow_page(runs: Path, uri: str | None, page: str) -> str:
    """Return the URL of a page of MLflow; empty if no server is known that has it.

    Without `tracking.uri` it is in the database under `runs`, which `make up` serves.
    """
    if page and uri is not None and uri.startswith(("http://", "https://")):
        server = urlsplit(uri)
        host = server.netloc.rpartition("@")[2]  # without a password
        return f"{server.scheme}://{host}{server.path.rstrip('/')}/{page}"
    mlflow = mlflow_of(runs) if page and uri is None else ""
    return f"{mlflow}/{page}" if mlflow else ""


def pages(runs: Path, project: Path, known: Mapping[str, str]) -> str:
    """Return one line: the pages of a run in Prefect and MLflow, or what serves them."""
    urls = list(known.values())
    if not urls and (prefect := record_of("prefect", services_of(runs))):
        urls.append(f"http://{LOOPBACK}:{prefect.port}/runs")
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
