"""Run an embedded Prefect API server for as long as this process lives.

Prefect's own temporary server has three faults: it dies of the same Ctrl-C as the flow, so the flow
hangs and stays `Running`; it outlives a `kill -9`; and it stops before all task runs are recorded.
This server runs in its own session under `tasks/process/supervise.py`, which ends it when this
process is gone and not before, and `prefect_server` waits for the records.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from flows.cli.bootstrap import QUIET, offer, prefect_settings, stay_off_proxies
from flows.servers.services import AUTH, LOOPBACK, URL, answers, running_server
from tasks.core.errors import PlumblineError
from tasks.process.child import PROJECT, Child

START_S = 300.0
"""Time limit of the start. It takes seconds on a quiet machine and minutes on a busy one."""
SETTLE_S = 10.0
POLL_S = 0.15
GRACE_S = 3.0
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}

log = logging.getLogger(__name__)

_running: dict[Path, tuple[Child, dict[str, str]]] = {}
"""Servers of this process by folder of runs, and the settings of their clients."""


@contextlib.contextmanager
def prefect_server(runs: Path, meanwhile: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Provide a Prefect API for the flow runs of the block.

    It is the server of `PREFECT_API_URL`, else that of `make up` for this folder, else one with
    SQLite under `<runs>/prefect`, which the next run of a sweep uses, too. Leaving the block waits
    until every task run is recorded; the server goes on until this process is gone, since Prefect
    still sends logs and events at exit. `meanwhile` is called while it starts.
    """
    if URL not in os.environ:
        os.environ |= running_server(runs.absolute())
    if URL in os.environ:
        _refresh_settings()
        yield
        return
    settings = _started(runs.absolute(), meanwhile)
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
    return any(os.environ.get(URL) == settings[URL] for _, settings in _running.values())


def _started(runs: Path, meanwhile: Callable[[], None]) -> dict[str, str]:
    """Return the settings of the server of this process, which is started if it does not run."""
    if runs in _running and _running[runs][0].poll() is None:
        return _running[runs][1]
    offer(prefect_settings(runs) | QUIET)
    stay_off_proxies()
    home, log_path = Path(os.environ["PREFECT_HOME"]), runs / "logs" / "prefect-server.log"
    home.mkdir(parents=True, exist_ok=True)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    # Two servers that create the tables of one new database at once both fail.
    with (home / ".starting").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child, settings = _launch(log_path)
        try:
            importlib.import_module("prefect.main")
            meanwhile()
            _wait_until_healthy(child, settings[URL], log_path)
        except BaseException:
            child.end()
            raise
    _running[runs] = (child, settings)
    return settings


def _launch(log_path: Path) -> tuple[Child, dict[str, str]]:
    auth = f"plumbline:{secrets.token_urlsafe(32)}"  # other users of this machine have no access
    with socket.create_server((LOOPBACK, 0)) as probe:
        port = probe.getsockname()[1]
    uvicorn = [sys.executable, "-m", "uvicorn", "--app-dir", str(PROJECT)]  # not the user's folder
    app = ["--factory", "prefect.server.api.server:create_app", "--log-level", "error"]
    env = {
        "PREFECT__SERVER_EPHEMERAL": "1",  # as of Prefect's own temporary server
        "PREFECT_UI_ENABLED": "false",
        "PREFECT_SERVER_API_AUTH_STRING": auth,
    }
    with log_path.open("ab") as output:
        words = [*uvicorn, *app, "--host", LOOPBACK, "--port", str(port)]
        child = Child(words, env=env, output=output, grace_s=GRACE_S)
    return child, {URL: f"http://{LOOPBACK}:{port}/api", AUTH: auth}


def _wait_until_healthy(child: Child, url: str, log_path: Path) -> None:
    """Wait until the server answers. Raises PlumblineError if it has ended or time is up."""
    deadline = time.monotonic() + START_S
    while not answers(url):
        if child.poll() is not None or time.monotonic() > deadline:
            raise PlumblineError(
                f"the embedded Prefect server did not start, see {log_path}",
                details=log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-20:],
                hint="set PREFECT_API_URL to use a server of your own",
            )
        time.sleep(POLL_S)


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
