"""Run a Prefect server, an MLflow server and a worker on loopback (`make up`, `make down`).

    python -m infra.servers.services up|deploy|down|status

Records, logs and the login are in `<runs>/services`. Environment variables: PLUMBLINE_RUNS (default
runs), PREFECT_PORT (default 4200), MLFLOW_PORT (default 5000). The databases are SQLite under the
folder of runs; Prefect's own variable PREFECT_API_DATABASE_CONNECTION_URL names another one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from flows.cli.bootstrap import bootstrap
from flows.servers.services import (
    AUTH,
    CLIENT_SETTINGS,
    LOOPBACK,
    URL,
    Api,
    client_settings,
    record_of,
    services_of,
)
from infra.servers.daemon import Daemon, start, stop, wait_ready
from tasks.core.errors import BusyError, PlumblineError
from tasks.core.private import stay_private
from tasks.pipeline.locks import hold

PROJECT = Path(__file__).resolve().parents[2]
# Started in this order and stopped in reverse, so that the worker always has its server.
NAMES = ("prefect", "mlflow", "worker")
PORTS = {"prefect": 4200, "mlflow": 5000}
POOL = "plumbline"
LEASES = "prefect.server.concurrency.lease_storage.filesystem"
# Grace period: a worker with a running flow ends only after the flow, which then gets SIGTERM.
STOP_S = 12.0


@dataclass(frozen=True)
class Services:
    """Folder of all files (an absolute path), and the loopback ports of the servers."""

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
        return os.environ | {
            "PLUMBLINE_PROJECT": str(PROJECT),
            "PLUMBLINE_RUNS": str(self.runs),
            URL: self.prefect.url,
            AUTH: self.auth,
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        }

    def daemons(self) -> tuple[Daemon, Daemon, Daemon]:
        """Return the three processes, in the order in which they start."""
        environment, store = self.environment(), self.runs / "mlflow"
        pages = {
            port: [f"{host}:{port}" for host in (LOOPBACK, "localhost")]
            for port in (self.prefect_port, self.mlflow_port)
        }
        origins = {port: ",".join(f"http://{h}" for h in hosts) for port, hosts in pages.items()}
        prefect = environment | {
            "PREFECT_SERVER_API_AUTH_STRING": self.auth,
            "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origins[self.prefect_port],
            "PREFECT_UI_API_URL": self.prefect.url,  # otherwise the pages use port 4200
            # On disk, so that a slot of a killed run is freed after a restart of the server, too.
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,
        }
        # Jobs are for GenAI scorers, which need nine more processes and 1.4 GB.
        mlflow = environment | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        prefect_place = ("--host", LOOPBACK, "--port", str(self.prefect_port))
        mlflow_words = {
            "--host": LOOPBACK,
            "--port": str(self.mlflow_port),
            "--workers": "1",
            # The database of runs without a server (flows/cli/composed.py): all share a history.
            "--backend-store-uri": f"sqlite:///{store / 'mlflow.db'}",
            "--artifacts-destination": str(store / "artifacts"),
            "--allowed-hosts": ",".join(pages[self.mlflow_port]),
            "--cors-allowed-origins": origins[self.mlflow_port],
        }
        worker = ("worker", "start", "--pool", POOL, "--type", "process", "--limit", "1")
        words = [word for pair in mlflow_words.items() for word in pair]
        return (
            Daemon("prefect", [tool("prefect"), "server", "start", *prefect_place], prefect,
                   self.prefect.answers, self.prefect_port),
            Daemon("mlflow", [tool("mlflow"), "server", *words], mlflow,
                   self.mlflow.answers, self.mlflow_port),
            Daemon("worker", [tool("prefect"), *worker], environment, self.worker_is_online),
        )  # fmt: skip

    def worker_is_online(self) -> bool:
        """Return True if the worker polls the pool; workers of an earlier `up` do not count."""
        record = record_of("worker", self.home)
        workers = self.prefect.post(f"/work_pools/{POOL}/workers/filter", {})
        beats = (datetime.fromisoformat(worker["last_heartbeat_time"]) for worker in workers or ())
        return record is not None and any(beat.timestamp() > record.started for beat in beats)

    def up(self) -> list[str]:
        """Start the services that do not run yet; if one fails, stop those of this call."""
        before = {name for name in NAMES if record_of(name, self.home)}
        try:
            self._start()
        except BaseException:
            for name in reversed(NAMES):
                if name not in before:
                    stop(name, self.home, grace_s=STOP_S)
            raise
        return self.status()

    def _start(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        (self.runs / "mlflow").mkdir(exist_ok=True)
        # The login's string is made once for a folder of runs.
        auth = self.auth or f"plumbline:{secrets.token_urlsafe(32)}"
        settings = {URL: self.prefect.url, AUTH: auth}
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()]
        note = "# A login: who can read this file can run commands as its owner.\n"
        (self.home / CLIENT_SETTINGS).write_text(note + "".join(lines))
        *servers, worker = self.daemons()
        for daemon in servers:  # at the same time, since both import for seconds
            start(daemon, self.home, PROJECT)
        for daemon in servers:
            wait_ready(daemon, self.home)
        self._make_pool()
        if record_of("worker", self.home) is None:
            bury_the_dead(self.prefect, of_deployments=True)  # they would hold the only slot
            with contextlib.suppress(BusyError), hold(self.runs, alone=True):
                bury_the_dead(self.prefect)  # no run of a terminal goes on
        start(worker, self.home, PROJECT)
        wait_ready(worker, self.home)

    def _make_pool(self) -> None:
        """Create or update the work pool: one run at a time on this machine.

        Its template has no job variables. Prefect's own one has `command`, `env` and `working_dir`,
        with which a flow run of any deployment could run any command.
        """
        template = json.loads(Path(__file__).with_name("work_pool.json").read_text())
        settings = {"base_job_template": template, "concurrency_limit": 1}
        if self.prefect.get(f"/work_pools/{POOL}") is None:
            self.prefect.post("/work_pools/", {"name": POOL, "type": "process", **settings})
        else:
            self.prefect.call("PATCH", f"/work_pools/{POOL}", settings)

    def deploy(self) -> list[str]:
        """Register the deployments of infra/prefect.yaml with our server."""
        if record_of("prefect", self.home) is None or not self.prefect.answers():
            raise PlumblineError(f"no Prefect server at {self.prefect.url}", hint="make up")
        words = ["--no-prompt", "deploy", "--all", "--prefect-file", "infra/prefect.yaml"]
        self._run(tool("prefect"), *words)
        login = shlex.quote(str(self.home / CLIENT_SETTINGS))
        run = f"{shlex.quote(tool('prefect'))} deployment run rlhf/rlhf-qlora"
        return [f"start    . {login} && {run} -p 'overrides=[\"+exp=qlora\"]'"]

    def _run(self, *argv: str) -> list[str]:
        """Run a command that talks to our server. Returns the lines of its output."""
        done = subprocess.run(
            argv,
            cwd=PROJECT,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise PlumblineError(
                f"{shlex.join(argv)} ended with status {done.returncode}",
                details=(done.stdout + done.stderr).splitlines()[-20:],
            )
        return done.stdout.splitlines()

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
        records = {name: record_of(name, self.home) for name in NAMES}
        lines = [
            f"{name:8} {f'runs, pid {record.pid}' if record else 'is not running'}"
            for name, record in records.items()
        ]
        if all(records.values()):
            page = self.prefect.url.replace("/api", "/runs")
            lines.append(f"login    {AUTH} in {self.home / CLIENT_SETTINGS}")
            lines.append(f"pages    {page}  {self.mlflow.url}")
        return lines


def bury_the_dead(api: Api, *, of_deployments: bool = False) -> int:
    """Mark unfinished runs as crashed: their process is gone (`kill -9`, power cut).

    Call it only while no other process can have such a flow run on this server. Returns the number
    of flow runs.
    """
    unfinished = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
    crashed = {"type": "CRASHED", "name": "Crashed", "message": "its process is gone"}
    started = {**unfinished, "deployment_id": {"is_null_": False}} if of_deployments else unfinished
    dead = [run["id"] for run in api.post("/flow_runs/filter", {"flow_runs": started})]
    tasks: dict[str, Any] = {"task_runs": unfinished, "flow_runs": {"id": {"any_": dead}}}
    dead_tasks = [run["id"] for run in api.post("/task_runs/filter", tasks)]
    for kind, ids in (("flow_runs", dead), ("task_runs", dead_tasks)):
        for each in ids:
            api.post(f"/{kind}/{each}/set_state", {"state": crashed, "force": True})
    return len(dead)


def tool(name: str) -> str:
    """Return the path of a command in this Python's environment; PATH may have another one."""
    return str(Path(sys.executable).with_name(name))


def services_of_environment() -> Services:
    """Read the services from the environment, and prepare it for Prefect and MLflow."""
    runs = Path(os.environ.get("PLUMBLINE_RUNS") or PROJECT / "runs").resolve()
    os.environ.pop(URL, None)  # these commands use our server only
    bootstrap(PROJECT, runs)
    return Services(runs, _port("prefect", runs), _port("mlflow", runs))


def _port(name: str, runs: Path) -> int:
    """Return the port of the running service, or that of its variable, or the default."""
    record = record_of(name, services_of(runs))
    if record and record.port:
        return record.port
    return int(os.environ.get(f"{name.upper()}_PORT") or PORTS[name])


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m infra.servers.services")
    parser.add_argument("command", choices=("up", "deploy", "down", "status"))
    command = parser.parse_args(argv).command
    stay_private()
    try:
        print("\n".join(getattr(services_of_environment(), command)()))
    except PlumblineError as error:
        print(error.report(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
