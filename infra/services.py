"""Run a Prefect server, an MLflow server and a worker on loopback (`make up`, `make down`).

    python -m infra.services up|deploy|down|status

Records and logs are in `<runs>/services`. Environment variables: PLUMBLINE_RUNS (default runs),
PREFECT_PORT (default 4200), MLFLOW_PORT (default 5000).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from flows.cli.bootstrap import bootstrap
from infra.api import answers, call_api
from infra.daemon import LOOPBACK, Daemon, record_of, start, stop, wait_ready
from tasks.core.errors import PlumblineError

PROJECT = Path(__file__).resolve().parents[1]
POOL = "plumbline"
# Started in this order and stopped in reverse, so that the worker always has its server.
NAMES = ("prefect", "mlflow", "worker")
PORTS = {"prefect": 4200, "mlflow": 5000}
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
        """Folder of records and logs."""
        return self.runs / "services"

    @property
    def api(self) -> str:
        """URL of the Prefect API."""
        return f"http://{LOOPBACK}:{self.prefect_port}/api"

    @property
    def mlflow(self) -> str:
        """URL of the MLflow server."""
        return f"http://{LOOPBACK}:{self.mlflow_port}"

    def environment(self) -> dict[str, str]:
        """Return the environment of the three processes: that of this process and our server."""
        return os.environ | {
            "PLUMBLINE_PROJECT": str(PROJECT),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            "PREFECT_UI_API_URL": self.api,  # otherwise the UI uses port 4200
        }

    def daemons(self) -> tuple[Daemon, ...]:
        """Return the three processes, in the order in which they start."""
        env = self.environment()
        prefect, mlflow = _tool("prefect"), _tool("mlflow")
        # The database of runs without a server (flows/cli/config.py), so that all share a history.
        store = self.runs / "mlflow"
        database, artifacts = store / "mlflow.db", store / "artifacts"
        return (
            Daemon(
                "prefect",
                [prefect, "server", "start", "--host", LOOPBACK, "--port", str(self.prefect_port)],
                env,
                partial(answers, f"{self.api}/health"),
                port=self.prefect_port,
            ),
            Daemon(
                "mlflow",
                [mlflow, "server", "--host", LOOPBACK, "--port", str(self.mlflow_port)]
                + ["--workers", "1", "--backend-store-uri", f"sqlite:///{database}"]
                + ["--artifacts-destination", str(artifacts)],
                env,
                partial(answers, f"{self.mlflow}/health"),
                port=self.mlflow_port,
            ),
            Daemon(
                "worker",
                [prefect, "worker", "start", "--pool", POOL, "--type", "process", "--limit", "1"],
                env,
                self.worker_is_online,
            ),
        )

    def worker_is_online(self) -> bool:
        """Return True if the worker polls the pool; workers of an earlier `up` do not count."""
        record = record_of("worker", self.home)
        workers = call_api("POST", f"{self.api}/work_pools/{POOL}/workers/filter", {})
        beats = (datetime.fromisoformat(worker["last_heartbeat_time"]) for worker in workers or ())
        return record is not None and any(beat.timestamp() > record.started for beat in beats)

    def up(self) -> list[str]:
        """Start the services that do not run yet. Returns one line for each service."""
        self.runs.mkdir(parents=True, exist_ok=True)
        before = {name for name in NAMES if record_of(name, self.home)}
        *servers, worker = self.daemons()
        for daemon in servers:  # at the same time, since both import for seconds
            start(daemon, self.home, PROJECT)
        for daemon in servers:
            wait_ready(daemon, self.home)
        start(worker, self.home, PROJECT)
        wait_ready(worker, self.home)
        # One run at a time on this machine, whatever its deployment.
        call_api("PATCH", f"{self.api}/work_pools/{POOL}", {"concurrency_limit": 1})
        return [self._line(name, "runs already" if name in before else "started") for name in NAMES]

    def deploy(self) -> None:
        """Register the deployments of infra/prefect.yaml with the running server.

        Raises:
            PlumblineError: there is no server, or Prefect refused a deployment.
        """
        if not answers(f"{self.api}/health"):
            raise PlumblineError(f"no Prefect server at {self.api}", hint="make up")
        done = subprocess.run(
            [_tool("prefect"), "--no-prompt", "deploy", "--all"]
            + ["--prefect-file", "infra/prefect.yaml"],
            cwd=PROJECT,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise PlumblineError(f"prefect deploy ended with code {done.returncode}")

    def down(self) -> list[str]:
        """Stop what `up` has started. Returns one line for each service."""
        return [
            f"{name:8} {'stopped' if stop(name, self.home, grace_s=STOP_S) else 'was not running'}"
            for name in reversed(NAMES)
        ]

    def status(self) -> list[str]:
        """Return one line for each service."""
        running = {name for name in NAMES if record_of(name, self.home)}
        return [self._line(name, "runs" if name in running else "is not running") for name in NAMES]

    def _line(self, name: str, state: str) -> str:
        record = record_of(name, self.home)
        places = {"prefect": self.api.removesuffix("/api"), "mlflow": self.mlflow}
        where = f"pid {record.pid}  {places.get(name, f'pool {POOL}')}" if record else ""
        return f"{name:8} {state:14} {where}".rstrip()


def _tool(name: str) -> str:
    """Return the path of a command in this Python's environment; PATH may have another one."""
    return str(Path(sys.executable).with_name(name))


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
    os.environ.pop("PREFECT_API_URL", None)  # these commands use our server only
    bootstrap(PROJECT, runs)
    home = runs / "services"
    return Services(
        runs=runs,
        prefect_port=_port("PREFECT_PORT", "prefect", home),
        mlflow_port=_port("MLFLOW_PORT", "mlflow", home),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m infra.services")
    parser.add_argument("command", choices=("up", "deploy", "down", "status"))
    command = parser.parse_args(argv).command
    try:
        for line in getattr(services_of_environment(), command)() or ():
            print(line)
    except PlumblineError as error:
        print(error.report(), file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
