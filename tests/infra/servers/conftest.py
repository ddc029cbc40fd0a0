"""Servers and a worker as `make up` starts them, on free ports, for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.services import Services
from tests.conftest import PROJECT
from tests.verify.serving import free_port

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Site:
    """Services and the environment that names them."""

    services: Services
    env: dict[str, str]

    @classmethod
    def at(cls, runs: Path) -> Site:
        """Return the services of a folder, on free ports. They do not run yet."""
        services = Services(runs, free_port(), free_port())
        env = os.environ | {
            "PLUMBLINE_RUNS": str(runs),
            "PREFECT_PORT": str(services.prefect_port),
            "MLFLOW_PORT": str(services.mlflow_port),
            # The defaults suit production; here they would only be waiting.
            "PREFECT_WORKER_QUERY_SECONDS": "2",
        }
        return cls(services, env)

    def command(self, name: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run `python -m infra.services NAME`."""
        return subprocess.run(
            [sys.executable, "-m", "infra.services", name],
            cwd=PROJECT, env=self.env | env, capture_output=True, text=True,
        )  # fmt: skip

    def require(self, name: str) -> str:
        """Run a command that has to succeed. Returns its output."""
        done = self.command(name)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def overrides(self, *more: str) -> list[str]:
        """Return the overrides of a plan in the services' own folder: short, starts nothing."""
        return ["+exp=qlora", "plan=true", f"paths.runs={self.services.runs / 'planned'}", *more]

    def deployment(self, name: str) -> dict[str, Any]:
        """Return a registered deployment."""
        deployments = self.services.request("POST", "/deployments/filter", {})
        return next(entry for entry in deployments if entry["name"] == name)

    def start_run(self, name: str, overrides: list[str], **body: Any) -> str:
        """Start a flow run of a deployment. Returns its id."""
        path = f"/deployments/{self.deployment(name)['id']}/create_flow_run"
        body["parameters"] = {"overrides": overrides}
        return str(self.services.request("POST", path, body)["id"])

    def finished_run(self, run_id: str) -> dict[str, Any]:
        """Return a flow run, once it has a final state."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            run: dict[str, Any] = self.services.request("GET", f"/flow_runs/{run_id}")
            if run["state_type"] in FINAL:
                return run
            assert time.monotonic() < deadline, f"{run}\n{self.worker_log[-3000:]}"
            time.sleep(0.5)

    def logged(self, run_id: str, words: str) -> None:
        """Wait until a flow run has logged these words; lines are sent in batches."""
        deadline = time.monotonic() + PATIENCE_S
        query = {"logs": {"flow_run_id": {"any_": [run_id]}}, "limit": 200}
        while True:
            logs = self.services.request("POST", "/logs/filter", query)
            lines = [line["message"] for line in logs]
            if any(words in line for line in lines):
                return
            assert time.monotonic() < deadline, "\n".join([*lines, self.worker_log[-3000:]])
            time.sleep(0.5)

    @property
    def worker_log(self) -> str:
        """Return the worker's log."""
        return (self.services.home / "worker.log").read_text(errors="replace")


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run the services, with the deployments of infra/prefect.yaml."""
    site = Site.at(tmp_path_factory.mktemp("site"))
    try:
        site.require("up")
        site.require("deploy")
        yield site
    finally:
        down = site.command("down")
    states = dict(line.split(maxsplit=1) for line in down.stdout.splitlines())
    assert states == dict.fromkeys(("worker", "mlflow", "prefect"), "stopped")
