"""The deployments, on a real Prefect server with a real worker: by hand, and by a schedule.

The schedule matters: with SQLAlchemy 2.1 this Prefect never creates a scheduled run, while runs
started by hand go on working. `plan=true` keeps the flow short: it prints and starts nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from infra.api import call_api
from infra.services import Services
from tasks.core.errors import PlumblineError
from tests.infra.requirements_files import PROJECT
from tests.infra.test_daemon import free_port

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Site:
    """Running services and the environment that names them."""

    services: Services
    env: dict[str, str]

    def command(self, name: str) -> subprocess.CompletedProcess[str]:
        """Runs `python -m infra.services NAME`."""
        return subprocess.run(
            [sys.executable, "-m", "infra.services", name],
            cwd=PROJECT,
            env=self.env,
            check=False,
            capture_output=True,
            text=True,
        )

    def api(self, method: str, path: str, body: Any) -> Any:
        """Reply of the Prefect API."""
        return call_api(method, f"{self.services.api}/{path}", body)

    def overrides(self) -> list[str]:
        """A plan in the tests' own folder."""
        return ["+exp=qlora", "plan=true", f"paths.runs={self.services.runs / 'planned'}"]

    def deployment(self, name: str) -> dict[str, Any]:
        """A registered deployment."""
        deployments = self.api("POST", "deployments/filter", {})
        return next(entry for entry in deployments if entry["name"] == name)

    def finished(self, query: dict[str, Any]) -> dict[str, Any]:
        """The first flow run that the query finds, once it reached a final state."""
        deadline = time.monotonic() + PATIENCE_S
        runs: list[dict[str, Any]] = []
        while time.monotonic() < deadline:
            runs = self.api(
                "POST", "flow_runs/filter", {"flow_runs": query, "sort": "EXPECTED_START_TIME_ASC"}
            )
            if runs and runs[0]["state_type"] in FINAL:
                return runs[0]
            time.sleep(0.5)
        states = [(run["name"], run["state_name"]) for run in runs]
        log = (self.services.home / "worker.log").read_text(errors="replace")
        pytest.fail(f"no final state within {PATIENCE_S:.0f} s: {states}\n{log[-3000:]}")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    services = Services(tmp_path_factory.mktemp("site"), free_port(), free_port())
    env = os.environ | {
        "PLUMBLINE_RUNS": str(services.runs),
        "PREFECT_PORT": str(services.prefect_port),
        "MLFLOW_PORT": str(services.mlflow_port),
        # The defaults suit production; here they would only be waiting.
        "PREFECT_SERVER_SERVICES_SCHEDULER_LOOP_SECONDS": "5",
        "PREFECT_WORKER_QUERY_SECONDS": "2",
    }
    site = Site(services, env)
    try:
        up = site.command("up")
        assert up.returncode == 0, up.stderr
        deployed = site.command("deploy")
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        yield site
    finally:
        down = site.command("down")
    assert [line.split(maxsplit=1)[1] for line in down.stdout.splitlines()] == ["stopped"] * 3


def test_up_again_finds_what_runs(site: Site) -> None:
    again = site.command("up")
    assert again.returncode == 0, again.stderr
    assert [
        line.split(" pid ")[0].split(maxsplit=1)[1].strip() for line in again.stdout.splitlines()
    ] == ["runs already"] * 3


@pytest.mark.parametrize(
    "name", ["rlhf-qlora", pytest.param("rlhf-nightly", marks=pytest.mark.slow)]
)
def test_runs_wait_for_each_other(site: Site, name: str) -> None:
    deployment = site.deployment(name)
    assert deployment["global_concurrency_limit"]["limit"] == 1
    assert deployment["concurrency_options"]["collision_strategy"] == "ENQUEUE"
    assert site.api("GET", "work_pools/plumbline", {})["concurrency_limit"] == 1


def test_overrides_are_a_list_of_strings(site: Site) -> None:
    path = f"deployments/{site.deployment('rlhf-qlora')['id']}/create_flow_run"
    with pytest.raises(PlumblineError, match="HTTP Error 4"):
        site.api("POST", path, {"parameters": {"overrides": "+exp=qlora"}})


def test_a_deployment_runs_by_hand(site: Site) -> None:
    started = subprocess.run(
        [str(Path(sys.executable).with_name("prefect")), "deployment", "run", "rlhf/rlhf-qlora"]
        + ["--param", f"overrides={json.dumps(site.overrides())}"],
        env=site.env | site.services.environment(),
        check=False,
        capture_output=True,
        text=True,
    )
    assert started.returncode == 0, started.stdout + started.stderr
    run = site.finished({"deployment_id": {"any_": [site.deployment("rlhf-qlora")["id"]]}})
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["parameters"] == {"overrides": site.overrides(), "tag": "manual"}


@pytest.mark.slow
def test_a_schedule_fires(site: Site) -> None:
    deployment = site.deployment("rlhf-nightly")
    schedule = {
        "schedule": {"interval": 15, "anchor_date": datetime.now(UTC).isoformat()},
        "active": True,
        "slug": "soon",
        "parameters": {"overrides": site.overrides(), "tag": "soon"},
    }
    path = f"deployments/{deployment['id']}/schedules"
    (made,) = site.api("POST", path, [schedule])
    assert made["active"]
    query = {"deployment_id": {"any_": [deployment["id"]]}, "tags": {"all_": ["auto-scheduled"]}}
    run = site.finished(query)
    assert run["auto_scheduled"]
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["parameters"] == {"overrides": site.overrides(), "tag": "soon"}
