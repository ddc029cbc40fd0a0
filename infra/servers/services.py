"""Run a Prefect server, an MLflow server and a worker on loopback (`make up`, `make down`).

    python -m infra.servers.services up|deploy|down|status

Records, logs and the login are in `<runs>/services`. Environment variables: PLUMBLINE_RUNS (default
runs), PREFECT_PORT (default 4200), MLFLOW_PORT (default 5000); databases: databases.py.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from flows.cli.bootstrap import bootstrap
from flows.servers.api import Api
from flows.servers.records import bury_the_dead
from flows.servers.services import (
    AUTH,
    CLIENT_SETTINGS,
    LOOPBACK,
    TRACKING,
    URL,
    client_settings,
    record_of,
    runs_page,
    services_of,
    write_client_settings,
)
from infra.servers import databases
from infra.servers.automations import apply
from infra.servers.daemon import Daemon, start, stop, wait_ready
from infra.servers.deployments import POOL, PROJECT, make_pool, register, tool
from tasks.core.errors import PlumblineError
from tasks.core.private import stay_private

# Started in this order and stopped in reverse, so that the worker always has its server.
NAMES = ("prefect", "mlflow", "worker")
PORTS = {"prefect": 4200, "mlflow": 5000}
LEASES = "prefect.server.concurrency.lease_storage.filesystem"
# Grace period: a worker with a running flow ends only after the flow, which then gets SIGTERM.
STOP_S = 12.0


@dataclass(frozen=True)
class Services:
    """Folder and ports of the services.

    Attributes:
        runs: absolute path of the folder for all files.
        prefect_port: loopback port of the Prefect API and UI.
        mlflow_port: loopback port of the MLflow server.
    """

    runs: Path
    prefect_port: int = PORTS["prefect"]
    mlflow_port: int = PORTS["mlflow"]

    @property
    def home(self) -> Path:
        """Folder of records, logs and the login."""
        return services_of(self.runs)

    @property
    def auth(self) -> str:
        """Authentication string of the Prefect server; empty before the first `up`."""
        return client_settings(self.home).get(AUTH, "")

    @property
    def prefect(self) -> Api:
        """API of the Prefect server."""
        return Api(f"http://{LOOPBACK}:{self.prefect_port}/api", self.auth)

    @property
    def mlflow(self) -> Api:
        """API of the MLflow server, which has no login."""
        return Api(f"http://{LOOPBACK}:{self.mlflow_port}")

    def environment(self) -> dict[str, str]:
        """Return the environment of Prefect's clients: that of this process and our server."""
        return databases.without_databases(os.environ) | {
            "PLUMBLINE_PROJECT": str(PROJECT),
            "PLUMBLINE_RUNS": str(self.runs),
            URL: self.prefect.url,
            AUTH: self.auth,
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        }

    def daemons(self) -> tuple[Daemon, ...]:
        """Return the three processes, in the order in which they start."""
        return self._prefect(), self._mlflow(), self._worker()

    def _prefect(self) -> Daemon:
        port = self.prefect_port
        pages = ",".join(f"http://{host}:{port}" for host in (LOOPBACK, "localhost"))
        server = {
            "PREFECT_SERVER_API_AUTH_STRING": self.auth,
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": pages,
            "PREFECT_UI_API_URL": self.prefect.url,  # otherwise the pages use port 4200
            # On disk, so that a slot of a killed run is freed after a restart of the server, too.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,
            **databases.own_database("prefect"),
        }
        return Daemon(
            "prefect",
            [tool("prefect"), "server", "start", "--host", LOOPBACK, "--port", str(port)],
            self.environment() | server,
            self.prefect.answers,
            port=port,
        )

    def _mlflow(self) -> Daemon:
        store, port = self.runs / "mlflow", self.mlflow_port
        # The database of runs without a server (flows/cli/config.py), so that all share a history.
        sqlite = {databases.VARIABLES["mlflow"][0]: f"sqlite:///{store / 'mlflow.db'}"}
        hosts = [f"{LOOPBACK}:{port}", f"localhost:{port}"]
        return Daemon(
            "mlflow",
            [tool("mlflow"), "server", "--host", LOOPBACK, "--port", str(port)]
            + ["--workers", "1", "--artifacts-destination", str(store / "artifacts")]
            + ["--allowed-hosts", ",".join(hosts)]
            + ["--cors-allowed-origins", ",".join(f"http://{host}" for host in hosts)],
            # Jobs are for GenAI scorers, which need nine more processes and 1.4 GB.
            # A URL with a password does not belong into a command line.
            self.environment()
            | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            | (databases.own_database("mlflow") or sqlite),
            self.mlflow.answers,
            port=port,
        )

    def _worker(self) -> Daemon:
        return Daemon(
            "worker",
            [tool("prefect"), "worker", "start", "--pool", POOL]
            + ["--type", "process", "--limit", "1"],
            self._tracking() | self.environment(),
            self.worker_is_online,
        )

    def _tracking(self) -> dict[str, str]:
        """Return the setting that sends runs to MLflow's server, unless SQLite has its records."""
        return {TRACKING: self.mlflow.url} if databases.url_of("mlflow") else {}

    def worker_is_online(self) -> bool:
        """Return True if the worker polls the pool; workers of an earlier `up` do not count."""
        record = record_of("worker", self.home)
        workers = self.prefect.post(f"/work_pools/{POOL}/workers/filter", {})
        beats = (datetime.fromisoformat(worker["last_heartbeat_time"]) for worker in workers or ())
        return record is not None and any(beat.timestamp() > record.started for beat in beats)

    def up(self) -> list[str]:
        """Start the services that do not run yet; if one fails, stop those of this call.

        Returns:
            One line for each service, then their pages.
        """
        before = {name for name in NAMES if record_of(name, self.home)}
        try:
            self._start()
        except BaseException:
            for name in reversed(NAMES):
                if name not in before:
                    stop(name, self.home, grace_s=STOP_S)
            raise
        lines = [
            self._line(name, "runs already" if name in before else "started") for name in NAMES
        ]
        return [*lines, *self._pages()]

    def _start(self) -> None:
        if record_of("prefect", self.home) is None:
            self._write_login()
            databases.remember(self.home)
        elif not self.auth:
            raise PlumblineError(
                f"the Prefect server that runs has no login in {self.home / CLIENT_SETTINGS}",
                hint="make down, then make up",
            )
        *servers, worker = self.daemons()
        for daemon in servers:  # at the same time, since both import for seconds
            start(daemon, self.home, PROJECT)
        for daemon in servers:
            wait_ready(daemon, self.home)
        make_pool(self.prefect)
        if record_of("worker", self.home) is None:
            bury_the_dead(self.prefect, of_deployments=True)  # they would hold the only slot
        start(worker, self.home, PROJECT)
        wait_ready(worker, self.home)

    def _write_login(self) -> None:
        """Write the login of the Prefect server; its string is made once for a folder of runs."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        auth = self.auth or f"plumbline:{secrets.token_urlsafe(32)}"
        write_client_settings(self.home, {URL: self.prefect.url, AUTH: auth, **self._tracking()})

    def deploy(self) -> list[str]:
        """Register the deployments of infra/prefect.yaml with the running server.

        Returns:
            One line for each deployment and the alarm, and the command that starts a run.

        Raises:
            PlumblineError: there is no server, or Prefect refused a deployment.
        """
        if record_of("prefect", self.home) is None or not self.prefect.answers():
            raise PlumblineError(f"no Prefect server at {self.prefect.url}", hint="make up")
        lines = register(self.prefect, self.home, self.environment())
        return [*lines[:-1], apply(self.prefect), lines[-1]]

    def down(self) -> list[str]:
        """Stop what `up` has started. Returns one line for each service, and for ended runs."""
        lines = []
        for name in reversed(NAMES):
            stopped = stop(name, self.home, grace_s=STOP_S)
            lines.append(f"{name:8} {'stopped' if stopped else 'was not running'}")
            if name == "worker" and record_of("prefect", self.home):
                with contextlib.suppress(PlumblineError):  # then `up` does it
                    if ended := bury_the_dead(self.prefect, of_deployments=True):
                        lines.append(f"runs     {ended} ended as Crashed")
        return lines

    def status(self) -> list[str]:
        """Return one line for each service, and their pages if they run."""
        running = {name for name in NAMES if record_of(name, self.home)}
        lines = [
            self._line(name, "runs" if name in running else "is not running") for name in NAMES
        ]
        return [*lines, *(self._pages() if len(running) == len(NAMES) else [])]

    def _pages(self) -> list[str]:
        page = self.prefect.url.replace("/api", "/runs")
        return [
            f"login    {AUTH} in {self.home / CLIENT_SETTINGS}",
            f"pages    {page}  {runs_page(self.mlflow)}",
        ]

    def _line(self, name: str, state: str) -> str:
        record = record_of(name, self.home)
        places = {"prefect": self.prefect.url.removesuffix("/api"), "mlflow": self.mlflow.url}
        where = f"pid {record.pid}  {places.get(name, f'pool {POOL}')}" if record else ""
        return f"{name:8} {state:14} {where}".rstrip()


def _port(variable: str, name: str, home: Path) -> int:
    """Return the port of the variable, or that of the running service, or the default."""
    record = record_of(name, home)
    usual = record.port if record and record.port else PORTS[name]
    text = os.environ.get(variable) or str(usual)
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise PlumblineError(f"{variable}={text} is not a port", hint=f"{variable}={PORTS[name]}")
    return int(text)


def services_of_environment() -> Services:
    """Read the services from the environment, and prepare it for Prefect and MLflow.

    Raises:
        PlumblineError: a variable is not a port.
    """
    runs = Path(os.environ.get("PLUMBLINE_RUNS") or PROJECT / "runs").resolve()
    os.environ.pop(URL, None)  # these commands use our server only
    bootstrap(PROJECT, runs)
    home = runs / "services"
    return Services(runs, *(_port(f"{name.upper()}_PORT", name, home) for name in PORTS))


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m infra.servers.services")
    parser.add_argument("command", choices=("up", "deploy", "down", "status"))
    command = parser.parse_args(argv).command
    stay_private()
    try:
        for line in getattr(services_of_environment(), command)() or ():
            print(line)
    except PlumblineError as error:
        print(error.report(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
