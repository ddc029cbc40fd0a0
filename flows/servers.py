"""Find the Prefect and MLflow servers of a run, or run an embedded Prefect server for it.

`make up` (`infra/services.py`) runs servers for a folder of runs. `<runs>/services` has
`<name>.json` for each process and `prefect.env`, the settings of Prefect's clients as a file that a
shell can read: `. <runs>/services/prefect.env`.

Without them a run has a server of its own. Prefect's temporary server has three faults: it dies of
the same Ctrl-C as the flow, so the flow hangs and stays `Running`; it outlives a `kill -9`; and it
stops before all task runs are recorded. Ours runs in its own session under
`tasks/process/supervise.py`, which ends it when this process is gone and not before.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import logging
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from flows.cli.bootstrap import QUIET, offer, prefect_settings, stay_off_proxies
from tasks.core.errors import PlumblineError
from tasks.process.child import PROJECT, Child

LOOPBACK = "127.0.0.1"
CLIENT_SETTINGS = "prefect.env"
URL, AUTH = "PREFECT_API_URL", "PREFECT_API_AUTH_STRING"
START_S = 300.0
"""Time limit of the start. It takes seconds on a quiet machine and minutes on a busy one."""
ANSWER_S = 30.0
SETTLE_S = 10.0
POLL_S = 0.15
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}

log = logging.getLogger(__name__)

_embedded: dict[Path, tuple[Child, dict[str, str]]] = {}
"""Servers of this process by folder of runs, and the settings of their clients."""


def answers(url: str, path: str = "/health", auth: str = "") -> bool:
    """Return True if a server answers a request; `auth` is `user:password`."""
    import httpx

    user, _, password = auth.partition(":")
    with contextlib.suppress(httpx.HTTPError):
        login = (user, password) if auth else None
        return httpx.get(url + path, auth=login, timeout=ANSWER_S, trust_env=False).is_success
    return False


@dataclass(frozen=True)
class Service:
    """A running process of `make up`, and the port of a server."""

    process: psutil.Process
    port: int | None


def services_of(runs: Path) -> Path:
    """Return the folder of the services' records, logs and settings."""
    return runs / "services"


def running(name: str, runs: Path) -> Service | None:
    """Return a service by its record: process id, start time, port; None if it does not run.

    The start time tells it from another process that has got its id later.
    """
    with contextlib.suppress(FileNotFoundError, PermissionError, psutil.NoSuchProcess):
        pid, started, port = json.loads((services_of(runs) / f"{name}.json").read_text())
        process = psutil.Process(pid)
        if process.status() != psutil.STATUS_ZOMBIE and process.create_time() == started:
            return Service(process, port)
    return None


def client_settings(runs: Path) -> dict[str, str]:
    """Return the variables of `prefect.env`; empty if there is no such file."""
    with contextlib.suppress(FileNotFoundError, PermissionError):
        words = shlex.split((services_of(runs) / CLIENT_SETTINGS).read_text(), comments=True)
        pairs = (word.partition("=") for word in words if "=" in word)
        return {name: value for name, _, value in pairs}
    return {}


def _settings_of_make_up(runs: Path) -> dict[str, str]:
    """Return the client settings of the Prefect server of `make up`; empty without a server."""
    service, settings = running("prefect", runs), client_settings(runs)
    # The string is sent to our own process only, never to one that has taken its port.
    if service is None or not settings.get(URL, "").endswith(f":{service.port}/api"):
        return {}
    return settings if answers(settings[URL], "/admin/version", settings[AUTH]) else {}


def mlflow_page(runs: Path, uri: str | None, page: str) -> str:
    """Return the URL of a page of MLflow; empty if no server is known that has it.

    Without `tracking.uri` it is in the database under `runs`, which `make up` serves.
    """
    if uri is not None and uri.startswith(("http://", "https://")):
        server = urlsplit(uri)
        host = server.netloc.rpartition("@")[2]  # without a password
        return f"{server.scheme}://{host}{server.path.rstrip('/')}/{page}"
    mlflow = running("mlflow", runs) if uri is None else None
    return f"http://{LOOPBACK}:{mlflow.port}/{page}" if mlflow else ""


@contextlib.contextmanager
def prefect_server(runs: Path, meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Provide a Prefect API for the flow runs of the block.

    It is the server of `PREFECT_API_URL`, else that of `make up` for this folder, else one with
    SQLite under `<runs>/prefect`, which the next run of a sweep uses, too. Leaving the block waits
    until every task run is recorded; the server goes on until this process is gone, since Prefect
    still sends logs and events at exit. `meanwhile` is called while it starts.
    """
    if URL not in os.environ:
        os.environ |= _settings_of_make_up(runs.absolute())
    if URL in os.environ:
        _refresh_settings()
        yield
        return
    settings = _start(runs.absolute(), meanwhile)
    os.environ |= settings
    _refresh_settings()
    logging.getLogger("prefect.flow_runs").addFilter(_no_link_to_a_page)
    entered = datetime.now(UTC).isoformat()
    try:
        yield
    finally:
        _wait_for_records(entered)
        for name in settings:  # the next run of a sweep is not given this server by its user
            os.environ.pop(name, None)


def is_embedded() -> bool:
    """Return True if this process uses an embedded server."""
    return any(os.environ.get(URL) == settings[URL] for _, settings in _embedded.values())


def _start(runs: Path, meanwhile: Callable[[], None]) -> dict[str, str]:
    """Return the settings of the server of this process, which is started if it does not run.

    Raises PlumblineError if it ends, or does not answer in time.
    """
    if runs in _embedded and _embedded[runs][0].poll() is None:
        return _embedded[runs][1]
    offer(prefect_settings(runs) | QUIET)
    stay_off_proxies()
    home, log_path = Path(os.environ["PREFECT_HOME"]), runs / "logs" / "prefect-server.log"
    home.mkdir(parents=True, exist_ok=True)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    auth = f"plumbline:{secrets.token_urlsafe(32)}"  # other users of this machine have no access
    env = {
        "PREFECT__SERVER_EPHEMERAL": "1",  # as of Prefect's own temporary server
        "PREFECT_UI_ENABLED": "false",
        "PREFECT_SERVER_API_AUTH_STRING": auth,
    }
    # Two servers that create the tables of one new database at once both fail.
    with (home / ".starting").open("w") as lock, contextlib.ExitStack() as stack:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with socket.create_server((LOOPBACK, 0)) as probe:
            port = probe.getsockname()[1]
        argv = [sys.executable, "-m", "uvicorn", "--app-dir", str(PROJECT)]  # not the user's folder
        argv += ["--factory", "prefect.server.api.server:create_app", "--log-level", "error"]
        argv += ["--host", LOOPBACK, "--port", str(port)]
        settings = {URL: f"http://{LOOPBACK}:{port}/api", AUTH: auth}
        with log_path.open("ab") as output:
            child = stack.enter_context(Child(argv, env=env, output=output))
        importlib.import_module("prefect.main")
        meanwhile()
        deadline = time.monotonic() + START_S
        while not answers(settings[URL]):
            if child.poll() is not None or time.monotonic() > deadline:
                raise PlumblineError(
                    f"the embedded Prefect server did not start, see {log_path}",
                    details=log_path.read_text(errors="replace").splitlines()[-20:],
                    hint=f"set {URL} to use a server of your own",
                )
            time.sleep(POLL_S)
        stack.pop_all()  # it stays
    _embedded[runs] = (child, settings)
    return settings


def _no_link_to_a_page(record: logging.LogRecord) -> bool:
    """Return False for Prefect's "View at <URL>": the embedded server serves no pages."""
    return not record.getMessage().startswith("View at ")


def _refresh_settings() -> None:
    """Let Prefect read its environment again; it was imported before the URL was known."""
    from prefect.context import refresh_global_settings_context

    refresh_global_settings_context()


def _wait_for_records(since: str) -> None:
    """Wait until the server has recorded all task runs of the flow runs that ended since a time.

    Task run states are sent as events, which the server writes a moment later than the state of the
    flow run. They count as recorded once all of them are final and two requests in a row return the
    same states.
    """
    import httpx
    from prefect.client.orchestration import get_client
    from prefect.events.worker import EventsWorker

    ended = {"start_time": {"after_": since}, "state": {"type": {"any_": sorted(FINAL)}}}
    before: dict[str, str] | None = None
    try:
        with get_client(sync_client=True) as client:
            runs = client.request("POST", "/flow_runs/filter", json={"flow_runs": ended}).json()
            EventsWorker.drain_all(timeout=SETTLE_S)
            wanted = {"flow_runs": {"id": {"any_": [run["id"] for run in runs]}}, "limit": 200}
            deadline = time.monotonic() + SETTLE_S
            while runs and time.monotonic() < deadline:
                tasks = client.request("POST", "/task_runs/filter", json=wanted).json()
                states = {task["id"]: task["state_type"] for task in tasks}
                if states == before and set(states.values()) <= FINAL:
                    return
                before = states
                time.sleep(POLL_S)
    except httpx.HTTPError as error:  # the result of the flow matters more than its records
        log.warning("the embedded Prefect server does not answer any more: %s", error)
        return
    if runs:
        log.warning("Prefect has not recorded all task runs within %g s", SETTLE_S)
