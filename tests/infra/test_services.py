"""The servers and the worker of `make up`, on free ports, as users and web pages meet them."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flows.servers import client_settings, running
from infra import services as module
from infra.services import NAMES, Services
from tasks.pipeline.artifact import Artifact, Origin, publish
from tasks.pipeline.locks import hold
from tasks.tracking.mlflow_server import RegisteredModel, Server
from tests.audit.making import make_model
from tests.commands import mlflow_client
from tests.conftest import PROJECT
from tests.verify.serving import free_port

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
PATIENCE_S = 120.0
EVIL = "http://evil.example"

pytestmark = pytest.mark.timeout(1500)  # servers start in minutes on a busy machine


@dataclass(frozen=True)
class Site:
    """Services of a folder and the environment that names them."""

    services: Services
    env: dict[str, str]

    @classmethod
    def at(cls, runs: Path) -> Site:
        """Return services that do not run yet."""
        services = Services(runs, free_port(), free_port())
        return cls(services, os.environ | {
            "PLUMBLINE_RUNS": str(runs),
            "PREFECT_PORT": str(services.prefect_port),
            "MLFLOW_PORT": str(services.mlflow_port),
            # The default suits production; here it would only be waiting.
            "PREFECT_WORKER_QUERY_SECONDS": "2",
        })  # fmt: skip

    def command(self, name: str) -> str:
        """Run `python -m infra.services NAME`, which has to succeed. Returns its output."""
        argv = [sys.executable, "-m", "infra.services", name]
        done = subprocess.run(argv, cwd=PROJECT, env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def plan(self) -> list[str]:
        """Return the overrides of a plan in a folder of its own: short, starts nothing."""
        return ["+exp=qlora", "plan=true", f"paths.runs={self.services.runs / 'planned'}"]

    def new_run_of(self, name: str) -> str:
        """Return the path that starts a flow run of a deployment."""
        deployments = self.services.request("POST", "/deployments/filter", {})
        ids = {entry["name"]: entry["id"] for entry in deployments}
        return f"/deployments/{ids[name]}/create_flow_run"

    def start_run(self, name: str, overrides: list[str]) -> str:
        """Start a flow run of a deployment. Returns its id."""
        body = {"parameters": {"overrides": overrides}}
        return str(self.services.request("POST", self.new_run_of(name), body)["id"])

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
            if any(words in line["message"] for line in logs):
                return
            assert time.monotonic() < deadline, f"{logs}\n{self.worker_log[-3000:]}"
            time.sleep(0.5)

    @property
    def worker_log(self) -> str:
        """The worker's log."""
        return (self.services.home / "worker.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Run the services, with the deployments of infra/prefect.yaml."""
    site = Site.at(tmp_path_factory.mktemp("site"))
    try:
        site.command("up")
        site.command("deploy")
        yield site
    finally:
        down = site.command("down")
    states = dict(line.split(maxsplit=1) for line in down.splitlines())
    assert states == dict.fromkeys(("worker", "mlflow", "prefect"), "stopped")


@pytest.mark.slow
def test_other_users_can_read_nothing(site: Site) -> None:
    runs, settings = site.services.runs, client_settings(site.services.runs)
    assert stat.S_IMODE((site.services.home / "prefect.env").stat().st_mode) == 0o600
    assert stat.S_IMODE(site.services.home.stat().st_mode) == 0o700
    assert settings["PREFECT_API_URL"] == site.services.prefect_url
    assert len(settings["PREFECT_API_AUTH_STRING"]) > 40
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            assert settings["PREFECT_API_AUTH_STRING"].encode() not in path.read_bytes()
    folders = [runs / name for name in ("prefect", "mlflow", "logs", "reports", "services")]
    paths = [p for folder in folders for p in folder.rglob("*") if not p.is_symlink()]
    assert {"mlflow.db", "worker.log"} <= {path.name for path in paths}
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


@pytest.mark.slow
def test_prefect_wants_the_login_and_a_token(site: Site) -> None:
    """A page of another site has neither, and its browser shows it no answer."""
    path, login = site.new_run_of("rlhf-qlora"), tuple(site.services.auth.split(":"))
    for method, place, headers, auth, statuses in (
        ("POST", path, {}, None, (401, 403)),
        ("GET", "/csrf-token?client=x", {}, None, (401,)),
        ("GET", "/admin/version", {}, ("a", "b"), (401,)),
        ("GET", "/admin/version", {}, login, (200,)),
        ("GET", "/admin/version", {"Origin": EVIL}, None, (401,)),
        ("POST", path, {"Origin": EVIL}, login, (403,)),
        ("OPTIONS", path,
         {"Origin": EVIL, "Access-Control-Request-Method": "POST"}, None, (400,)),
    ):  # fmt: skip
        body = {} if method == "POST" else None
        answer = httpx.request(
            method, site.services.prefect_url + place, json=body, headers=headers, auth=auth
        )
        assert answer.status_code in statuses, (method, place, headers)


@pytest.mark.slow
def test_the_printed_command_starts_a_run(site: Site) -> None:
    """Typed on any terminal: in another folder, with nothing of `make` in the environment."""
    printed = site.command("deploy").splitlines()[-1].removeprefix("start").strip()
    assert '["+exp=qlora"]' in printed
    typed = printed.replace('["+exp=qlora"]', json.dumps(site.plan()))
    started = subprocess.run(
        ["bash", "-c", typed],
        cwd="/", env={"HOME": str(site.services.runs), "PATH": os.environ["PATH"]},
        capture_output=True, text=True,
    )  # fmt: skip
    assert started.returncode == 0, started.stdout + started.stderr
    (run_id,) = re.findall(r"UUID: (\S+)", started.stdout)
    run = site.finished_run(run_id)
    assert run["state_type"] == "COMPLETED", run["state"]
    assert run["parameters"] == {"overrides": site.plan(), "tag": "manual"}


@pytest.fixture
def registered(site: Site) -> list[Artifact]:
    """Two versions of a model, of which the second is `candidate`, and one of another program."""
    server = Server(site.services.mlflow_url, None)
    client = mlflow_client(site.services.mlflow_url, site.services.mlflow_url)
    run = client.create_run(server.experiment_id("plumbline"))
    artifacts = []
    for seed in (1, 2):
        place = site.services.runs / "artifacts" / "served"
        work = make_model(place / f".work{seed}", bos_token_id=seed)
        key = f"key{seed}"
        artifacts.append(publish(work, place / key, Origin("served", "convert", key)))
        model = RegisteredModel("plumbline", artifacts[-1], f"2026-03-0{seed}T10:00:00+00:00")
        server.register(model, run.info.run_id, "plumbline")
    client.create_registered_model("elsewhere")
    client.create_model_version("elsewhere", "s3://elsewhere/model")
    return artifacts


def table(site: Site, run_id: str) -> list[dict[str, Any]]:
    """Return the rows of the only table of a flow run."""
    query = {"artifacts": {"flow_run_id": {"any_": [run_id]}, "key": {"like_": "audit-registry"}}}
    (artifact,) = site.services.request("POST", "/artifacts/filter", query)
    assert artifact["description"] == "1 of 3 registered versions audited"
    rows: list[dict[str, Any]] = json.loads(artifact["data"])
    return rows


@pytest.mark.slow
def test_the_registry_is_audited(site: Site, registered: list[Artifact]) -> None:
    """A byte that changes on the disk of a registered model fails the weekly audit."""
    run = site.finished_run(site.start_run("audit-registry", []))
    assert run["state_type"] == "COMPLETED", run["state"]
    (row,) = table(site, run["id"])
    assert row.pop("warnings") >= 0
    folder = str(registered[1].path)
    assert row == {
        "version": "plumbline/2", "aliases": "candidate", "folder": folder, "errors": 0,
        "problem": "",
    }  # fmt: skip

    weights = registered[1].path / "model.safetensors"
    weights.chmod(0o644)
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    run = site.finished_run(site.start_run("audit-registry", []))
    assert run["state_type"] == "FAILED", run["state"]
    (row,) = table(site, run["id"])
    assert row["errors"] >= 1
    assert "tensor" in row["problem"]
    assert "plumbline/2" in run["state"]["message"]
    assert "->" in run["state"]["message"]


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """Services that do not run yet, and are stopped at the end of the test."""
    site = Site.at(tmp_path / "runs")
    yield site
    site.command("down")


@pytest.mark.slow
def test_the_queue_goes_on_after_down_and_after_kill_9(own_site: Site) -> None:
    """A run that is stopped in the middle must not hold the only slot of its deployment."""
    own_site.command("up")
    own_site.command("deploy")
    waiting = ["+exp=qlora", f"paths.runs={own_site.services.runs / 'planned'}"]
    with hold(own_site.services.runs / "planned", alone=True):
        stopped = waits(own_site, waiting)
        queued = own_site.start_run("rlhf-qlora", own_site.plan())
        own_site.command("down")
        own_site.command("up")
        assert own_site.finished_run(stopped)["state_type"] == "CRASHED"
        assert own_site.finished_run(queued)["state_type"] == "COMPLETED"

        killed = waits(own_site, waiting)
        for name in NAMES:
            daemon = running(name, own_site.services.runs)
            assert daemon is not None
            for member in [daemon.process, *daemon.process.children(recursive=True)]:
                os.kill(member.pid, signal.SIGKILL)
        own_site.command("up")
        assert own_site.finished_run(killed)["state_type"] == "CRASHED"
        queued = own_site.start_run("rlhf-qlora", own_site.plan())
        assert own_site.finished_run(queued)["state_type"] == "COMPLETED"


def waits(site: Site, overrides: list[str]) -> str:
    """Start a flow run and wait until it waits for its folder. Returns its id."""
    run_id = site.start_run("rlhf-qlora", overrides)
    site.logged(run_id, "waits: ")
    return run_id


# Has a child that ignores SIGTERM.
PARENT = """
import subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)"
child = subprocess.Popen([sys.executable, "-c", stubborn + "; time.sleep(300)"], stdout=-1)
print(child.stdout.readline(), flush=True)
time.sleep(300)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Services:
    monkeypatch.setattr(module, "STOP_S", 0.5)
    own = Services(tmp_path)
    own.home.mkdir()
    return own


def test_a_service_is_stopped_with_its_children(own: Services) -> None:
    process = psutil.Popen([sys.executable, "-c", PARENT], stdout=-1)
    process.stdout.readline()
    record = json.dumps([process.pid, process.create_time(), None])
    (own.home / "worker.json").write_text(record)
    service = running("worker", own.runs)
    assert service is not None
    family = [service.process, *service.process.children()]
    assert len(family) == 2
    assert own._stop("worker")
    psutil.wait_procs(family, timeout=5)
    assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert running("worker", own.runs) is None
    assert not own._stop("worker")


def test_another_process_with_a_recycled_id_is_not_touched(own: Services) -> None:
    bystander = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        record = json.dumps([bystander.pid, bystander.create_time() - 3600, None])
        (own.home / "worker.json").write_text(record)
        assert not own._stop("worker")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
