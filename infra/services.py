"""Prefect server, MLflow server and a process worker on loopback: `make up`, `deploy`, `down`.

    python -m infra.services up|deploy|down|status

Records and logs lie under `<runs>/services`. The environment decides: PLUMBLINE_RUNS (runs),
PREFECT_PORT (4200), MLFLOW_PORT (5000).
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
# Started in this order, stopped in the reverse one: a worker notices that its server is gone.
NAMES = ("prefect", "mlflow", "worker")
PORTS = {"prefect": 4200, "mlflow": 5000}
# A worker with a running flow ends only when the flow does; then its flow is asked to end too.
STOP_S = 12.0


@dataclass(frozen=True)
class Services:
    """Where the services keep their files and which ports they open.

    Attributes:
        runs: absolute path of the folder that everything goes under.
        prefect_port: loopback port of the Prefect API and UI.
        mlflow_port: loopback port of the MLflow server.
    """

    runs: Path
    prefect_port: int = PORTS["prefect"]
    mlflow_port: int = PORTS["mlflow"]

    @property
    def home(self) -> Path:
        """Folder of the records and logs."""
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
        """Environment of all three processes: that of a run (see `bootstrap`), and our server."""
        return os.environ | {
            "PLUMBLINE_PROJECT": str(PROJECT),
            "PREFECT_API_URL": self.api,
            "PREFECT_SERVER_ALLOW_EPHEMERAL_MODE": "false",
            "PREFECT_UI_API_URL": self.api,  # the UI asks port 4200 otherwise
        }

    def daemons(self) -> tuple[Daemon, ...]:
        """The three processes, in the order in which they start."""
        env = self.environment()
        prefect, mlflow = _tool("prefect"), _tool("mlflow")
        # What a run without a server writes too (flows/cli/config.py): one history.
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
        """Whether our worker polls the pool; one of an earlier `up` may still be listed."""
        record = record_of("worker", self.home)
        found = call_api("POST", f"{self.api}/work_pools/{POOL}/workers/filter", {})
        beats = (datetime.fromisoformat(worker["last_heartbeat_time"]) for worker in found or ())
        return record is not None and any(beat.timestamp() > record.started for beat in beats)

    def up(self) -> list[str]:
        """Starts what does not run yet; returns one line for each service."""
        self.runs.mkdir(parents=True, exist_ok=True)
        before = {name for name in NAMES if record_of(name, self.home)}
        *servers, worker = self.daemons()
        for daemon in servers:  # side by side: most of the time goes into their imports
            start(daemon, self.home, PROJECT)
        for daemon in servers:
            wait_ready(daemon, self.home)
        start(worker, self.home, PROJECT)
        wait_ready(worker, self.home)
        # Two runs never share the machine, whichever deployments they come from.
        call_api("PATCH", f"{self.api}/work_pools/{POOL}", {"concurrency_limit": 1})
        return [self._line(name, "runs already" if name in before else "started") for name in NAMES]

    def deploy(self) -> None:
        """Registers the deployments of infra/prefect.yaml with the running server.

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
        """Stops what `up` started, and nothing else; returns one line for each service."""
        return [
            f"{name:8} {'stopped' if stop(name, self.home, grace_s=STOP_S) else 'was not running'}"
            for name in reversed(NAMES)
        ]

    def status(self) -> list[str]:
        """One line for each service."""
        running = {name for name in NAMES if record_of(name, self.home)}
        return [self._line(name, "runs" if name in running else "is not running") for name in NAMES]

    def _line(self, name: str, state: str) -> str:
        record = record_of(name, self.home)
        places = {"prefect": self.api.removesuffix("/api"), "mlflow": self.mlflow}
        where = f"pid {record.pid}  {places.get(name, f'pool {POOL}')}" if record else ""
        return f"{name:8} {state:14} {where}".rstrip()


def _tool(name: str) -> str:
    """A command of the environment that runs us; PATH may hold another one."""
    return str(Path(sys.executable).with_name(name))


def _port(variable: str, name: str, home: Path) -> int:
    """The port asked for, else the one the service runs on, else its usual one."""
    record = record_of(name, home)
    usual = record.port if record and record.port else PORTS[name]
    text = os.environ.get(variable) or str(usual)
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise PlumblineError(f"{variable}={text} is no port", hint=f"{variable}={PORTS[name]}")
    return int(text)


def services_of_environment() -> Services:
    """The services that the environment asks for; prepares the environment for Prefect and MLflow.

    Raises:
        PlumblineError: a port is none.
    """
    runs = Path(os.environ.get("PLUMBLINE_RUNS") or PROJECT / "runs").resolve()
    os.environ.pop("PREFECT_API_URL", None)  # ours is the one to talk to
    bootstrap(PROJECT, runs)
    home = runs / "services"
    return Services(
        runs=runs,
        prefect_port=_port("PREFECT_PORT", "prefect", home),
        mlflow_port=_port("MLFLOW_PORT", "mlflow", home),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
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
