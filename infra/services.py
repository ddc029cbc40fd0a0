"""Run a Prefect server, an MLflow server and a worker on loopback (`make up`, `make down`).

    python -m infra.services up|deploy|down|status

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
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil

from flows.cli.bootstrap import bootstrap
from flows.servers import (
    AUTH,
    CLIENT_SETTINGS,
    LOOPBACK,
    START_S,
    URL,
    answers,
    client_settings,
    running,
    services_of,
)
from tasks.core.errors import BusyError, PlumblineError
from tasks.core.files import stay_private
from tasks.pipeline.locks import hold
from tasks.process.child import PROJECT

# Started in this order and stopped in reverse, so that the worker always has its server.
NAMES = ("prefect", "mlflow", "worker")
PORTS = {"prefect": 4200, "mlflow": 5000}
POOL = "plumbline"
LEASES = "prefect.server.concurrency.lease_storage.filesystem"
AGAIN = "make down, then make up"
# A worker with a running flow ends only after the flow, which gets SIGTERM after this time.
STOP_S = 12.0
TAIL_LINES = 15


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
        return client_settings(self.runs).get(AUTH, "")

    @property
    def prefect_url(self) -> str:
        """Address of the API of the Prefect server."""
        return f"http://{LOOPBACK}:{self.prefect_port}/api"

    @property
    def mlflow_url(self) -> str:
        """Address of the MLflow server, which has no login."""
        return f"http://{LOOPBACK}:{self.mlflow_port}"

    def request(self, method: Any, path: str, body: object = None) -> Any:
        """Return the JSON answer of the Prefect server to a request. Raises PlumblineError."""
        import httpx
        from prefect.client.orchestration import SyncPrefectClient

        try:
            with SyncPrefectClient(self.prefect_url, auth_string=self.auth) as client:
                answer = client.request(method, path, json=body)
        except httpx.HTTPError as error:
            what = f"{method} {self.prefect_url}{path}: {error}"
            raise PlumblineError(what, hint=AGAIN) from None
        return answer.json() if answer.content else None

    def environment(self) -> dict[str, str]:
        """Return the environment of Prefect's clients: that of this process and our server."""
        return os.environ | {
            "PLUMBLINE_PROJECT": str(PROJECT),
            "PLUMBLINE_RUNS": str(self.runs),
            URL: self.prefect_url,
            AUTH: self.auth,
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
        }

    def command(self, name: str) -> tuple[list[str], dict[str, str]]:
        """Return the command of a service, and additions to its environment."""
        if name == "worker":
            words = ["worker", "start", "--pool", POOL, "--type", "process", "--limit", "1"]
            return [tool("prefect"), *words], {}
        port = self.prefect_port if name == "prefect" else self.mlflow_port
        hosts = [f"{host}:{port}" for host in (LOOPBACK, "localhost")]
        origins = ",".join(f"http://{host}" for host in hosts)
        place = ["--host", LOOPBACK, "--port", str(port)]
        if name == "prefect":
            return [tool("prefect"), "server", "start", *place], {
                "PREFECT_SERVER_API_AUTH_STRING": self.auth,
                "PREFECT_SERVER_CSRF_PROTECTION_ENABLED": "true",
                "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": origins,
                "PREFECT_UI_API_URL": self.prefect_url,  # otherwise the pages use port 4200
                # On disk: a slot of a killed run is freed after a restart of the server, too.
                "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": LEASES,
            }
        store = self.runs / "mlflow"
        # The database of runs without a server (flows/cli/composed.py): all share a history.
        place += ["--workers", "1", "--backend-store-uri", f"sqlite:///{store / 'mlflow.db'}"]
        place += ["--artifacts-destination", str(store / "artifacts")]
        place += ["--allowed-hosts", ",".join(hosts), "--cors-allowed-origins", origins]
        # Jobs are for GenAI scorers, which need nine more processes and 1.4 GB.
        return [tool("mlflow"), "server", *place], {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}

    def up(self) -> list[str]:
        """Start the services that do not run yet; if one fails, stop those of this call."""
        ours = [name for name in NAMES if not running(name, self.runs)]
        try:
            self._write_login()
            self._start("prefect", "mlflow")
            self._make_pool()
            if "worker" in ours:
                self._bury_the_dead(of_deployments=True)  # they would hold the only slot
                with contextlib.suppress(BusyError), hold(self.runs, alone=True):
                    self._bury_the_dead()  # no run of a terminal goes on
            self._start("worker")
        except BaseException:
            for name in reversed(ours):
                self._stop(name)
            raise
        return self.status()

    def _write_login(self) -> None:
        """Write the settings of Prefect's clients, with a login that is made once for a folder."""
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o700)
        (self.runs / "mlflow").mkdir(exist_ok=True)
        auth = self.auth or f"plumbline:{secrets.token_urlsafe(32)}"
        settings = {URL: self.prefect_url, AUTH: auth}
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in settings.items()]
        note = "# A login: who can read this file can run commands as its owner.\n"
        (self.home / CLIENT_SETTINGS).write_text(note + "".join(lines))

    def _start(self, *names: str) -> None:
        """Start services that do not run, at the same time, and wait until all are ready.

        Raises BusyError for a port in use, PlumblineError for a service that ends or is too slow.
        """
        for name in names:
            if not running(name, self.runs):
                self._spawn(name)
        deadline = time.monotonic() + START_S
        for name in names:
            while not self._is_ready(name):
                if not running(name, self.runs) or time.monotonic() > deadline:
                    log = self.home / f"{name}.log"
                    tail = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
                    what = f"{name} did not start, see {log}"
                    raise PlumblineError(what, details=tail, hint=AGAIN)
                time.sleep(0.2)

    def _spawn(self, name: str) -> None:
        """Start a process that outlives this one, and write its record."""
        port = {"prefect": self.prefect_port, "mlflow": self.mlflow_port}.get(name)
        if port is not None:
            try:
                socket.create_server((LOOPBACK, port)).close()
            except OSError as error:
                hint = f"make up {name.upper()}_PORT={port + 1}"
                raise BusyError(f"port {port} for {name} is taken: {error}", hint=hint) from error
        argv, more = self.command(name)
        with (self.home / f"{name}.log").open("ab") as log:
            child = psutil.Popen(
                argv, cwd=PROJECT, env=self.environment() | more, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        record = [child.pid, child.create_time(), port]
        (self.home / f"{name}.json").write_text(json.dumps(record) + "\n")

    def _is_ready(self, name: str) -> bool:
        """Return True if a server answers, or the worker polls the pool."""
        if name != "worker":
            return answers({"prefect": self.prefect_url, "mlflow": self.mlflow_url}[name])
        workers = self.request("POST", f"/work_pools/{POOL}/workers/filter", {})
        beats = [datetime.fromisoformat(worker["last_heartbeat_time"]) for worker in workers]
        service = running("worker", self.runs)  # workers of an earlier `up` do not count
        started = service.process.create_time() if service else float("inf")
        return any(beat.timestamp() > started for beat in beats)

    def _make_pool(self) -> None:
        """Create or update the work pool: one run at a time on this machine.

        Its template has no job variables. Prefect's own one has `command`, `env` and `working_dir`,
        with which a flow run of any deployment could run any command.
        """
        template = json.loads((PROJECT / "infra" / "work_pool.json").read_text())
        pool: dict[str, object] = {"base_job_template": template, "concurrency_limit": 1}
        ours = {"work_pools": {"name": {"any_": [POOL]}}}
        if self.request("POST", "/work_pools/filter", ours):
            self.request("PATCH", f"/work_pools/{POOL}", pool)
        else:
            self.request("POST", "/work_pools/", pool | {"name": POOL, "type": "process"})

    def _bury_the_dead(self, *, of_deployments: bool = False) -> None:
        """Mark unfinished runs as crashed: their process is gone (`kill -9`, power cut).

        Call it only while no other process can have such a flow run on this server.
        """
        unfinished = {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}}
        crashed = {"type": "CRASHED", "name": "Crashed", "message": "its process is gone"}
        flows: dict[str, object] = dict(unfinished)
        if of_deployments:
            flows["deployment_id"] = {"is_null_": False}
        tasks = {"flow_runs": flows, "task_runs": unfinished}
        # Tasks first: they are found by the state of their flow.
        for kind, query in (("task_runs", tasks), ("flow_runs", {"flow_runs": flows})):
            for run in self.request("POST", f"/{kind}/filter", query):
                path = f"/{kind}/{run['id']}/set_state"
                self.request("POST", path, {"state": crashed, "force": True})

    def deploy(self) -> list[str]:
        """Register the deployments of infra/prefect.yaml with our server."""
        if not running("prefect", self.runs) or not answers(self.prefect_url):
            raise PlumblineError(f"no Prefect server at {self.prefect_url}", hint="make up")
        words = ["--no-prompt", "deploy", "--all", "--prefect-file", "infra/prefect.yaml"]
        argv, environment = [tool("prefect"), *words], self.environment()
        done = subprocess.run(argv, cwd=PROJECT, env=environment, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise PlumblineError(f"{shlex.join(argv)} ended with status {done.returncode}")
        login = shlex.quote(str(self.home / CLIENT_SETTINGS))
        run = f"{shlex.quote(tool('prefect'))} deployment run rlhf/rlhf-qlora"
        return [f"start    . {login} && {run} -p 'overrides=[\"+exp=qlora\"]'"]

    def down(self) -> list[str]:
        """Stop what `up` has started. Returns one line for each service."""
        stopped = {name: self._stop(name) for name in reversed(NAMES)}
        return [f"{n:8} {'stopped' if done else 'was not running'}" for n, done in stopped.items()]

    def _stop(self, name: str) -> bool:
        """Stop a service and all of its descendants. Returns False if it does not run.

        It gets SIGTERM first, its descendants after a time. Processes that are left after the same
        time again get SIGKILL.
        """
        service = running(name, self.runs)
        if service is not None:
            family = [service.process, *service.process.children(recursive=True)]
            for signalled, send in (
                (family[:1], psutil.Process.terminate),
                (family, psutil.Process.terminate),
                (family, psutil.Process.kill),
            ):
                for member in signalled:
                    if member.is_running():  # also False for another process with its id
                        send(member)
                if not psutil.wait_procs(family, timeout=STOP_S)[1]:
                    break
        (self.home / f"{name}.json").unlink(missing_ok=True)
        return service is not None

    def status(self) -> list[str]:
        """Return one line for each service, and their pages if they run."""
        services = {name: running(name, self.runs) for name in NAMES}
        lines = [
            f"{name:8} {f'runs, pid {service.process.pid}' if service else 'is not running'}"
            for name, service in services.items()
        ]
        if all(services.values()):
            page = self.prefect_url.replace("/api", "/runs")
            lines.append(f"login    {AUTH} in {self.home / CLIENT_SETTINGS}")
            lines.append(f"pages    {page}  {self.mlflow_url}")
        return lines


def tool(name: str) -> str:
    """Return the path of a command in this Python's environment; PATH may have another one."""
    return str(Path(sys.executable).with_name(name))


def main() -> int:
    """Run one command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m infra.services")
    parser.add_argument("command", choices=("up", "deploy", "down", "status"))
    command = parser.parse_args().command
    stay_private()
    runs = Path(os.environ.get("PLUMBLINE_RUNS") or PROJECT / "runs").resolve()
    os.environ.pop(URL, None)  # these commands use our server only
    bootstrap(runs)
    ports = []
    for name, default in PORTS.items():
        service = running(name, runs)
        port = os.environ.get(f"{name.upper()}_PORT") or default
        ports.append(service.port if service and service.port else int(port))
    try:
        print("\n".join(getattr(Services(runs, *ports), command)()))
    except PlumblineError as error:
        print(error.report(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
