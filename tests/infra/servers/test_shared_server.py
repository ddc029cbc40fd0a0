"""Several runs at the server of `make up`: twenty at once, and stages that wait for a device."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from flows.orchestration.devices import LEASE_S
from flows.servers.services import record_of
from tests.infra.requirements_files import PROJECT
from tests.infra.servers.site import Site

COUNT = 20
SCRIPT = Path(__file__).with_name("tiny_flow.py")
STAGE = """
import sys, time
from flows.cli.bootstrap import bootstrap
from flows.cli.config import compose_config
from pathlib import Path
runs, wait_s, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
bootstrap(Path("/"), runs)
from flows.orchestration.devices import reserve
from tasks.core.errors import BusyError
from tasks.pipeline.locks import Needs, Patience
say = Patience(None if wait_s == "null" else float(wait_s), lambda line: print(line, flush=True))
composed = compose_config([f"paths.runs={runs}"])
try:
    with reserve(composed, Needs.DEVICE, say):
        print("has it", flush=True)
        while seconds > 0 and not (runs / "end").exists():
            time.sleep(0.1)
            seconds -= 0.1
    print("done", flush=True)
except BusyError as error:
    print("busy:", error, flush=True)
"""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
NAME = f"plumbline-cpu-{socket.gethostname()}"


@pytest.mark.timeout(1500)
def test_none_of_twenty_flows_is_lost(busy_site: Site, tmp_path: Path) -> None:
    """They share one folder, its artifacts and its MLflow, and queue for the only device."""
    runs, prefect = busy_site.services.runs, busy_site.services.prefect
    started = []
    for number in range(COUNT):
        with (tmp_path / f"{number}.out").open("wb") as out:
            argv = [sys.executable, str(SCRIPT), str(runs), str(number)]
            env = busy_site.env | {"PYTHONPATH": str(PROJECT)}
            started.append(subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=out, stderr=out))
    codes = [each.wait(1400) for each in started]
    texts = [(tmp_path / f"{number}.out").read_text() for number in range(COUNT)]
    failed = [text for code, text in zip(codes, texts, strict=True) if code]
    assert failed == []
    here = f"pages: http://127.0.0.1:{busy_site.services.prefect_port}/runs/flow-run/"
    assert [text for text in texts if not text.splitlines()[-1].startswith(here)] == []

    names = [f"tiny-{number}" for number in range(COUNT)]
    wanted = {"flow_runs": {"name": {"any_": names}}, "limit": 200}
    flow_runs = prefect.post("/flow_runs/filter", wanted)
    assert sorted(run["name"] for run in flow_runs) == sorted(names)
    assert Counter(run["state_type"] for run in flow_runs) == {"COMPLETED": COUNT}
    tasks = {"flow_runs": {"id": {"any_": [run["id"] for run in flow_runs]}}, "limit": 200}
    states = Counter(run["state_type"] for run in prefect.post("/task_runs/filter", tasks))
    assert states == {"COMPLETED": 3 * COUNT}

    summaries = [json.loads(path.read_text()) for path in runs.glob("reports/*/summary.json")]
    tiny = [summary for summary in summaries if summary["flow"] == "tiny"]
    assert len(tiny) == COUNT
    made = Counter(
        entry["name"] for each in tiny for entry in each["stages"] if not entry["reused"]
    )
    assert made == {"base": 1, "train": COUNT, "convert": COUNT}

    client = MlflowClient(f"sqlite:///{runs}/mlflow/mlflow.db")
    (experiment,) = [e for e in client.search_experiments() if e.name == "plumbline"]
    tracked = client.search_runs([experiment.experiment_id], max_results=1000)
    parents = [run.info for run in tracked if run.info.run_name.startswith("tiny ")]
    assert sorted(info.run_name for info in parents) == sorted(f"tiny {n}" for n in range(COUNT))
    ids = {info.run_id for info in parents}
    children = [run.info for run in tracked if run.data.tags.get("mlflow.parentRunId") in ids]
    assert len(children) == 3 * COUNT
    assert {info.status for info in [*parents, *children]} == {"FINISHED"}
    assert list((runs / "mlflow" / "outbox").glob("*/journal.jsonl")) == []


class Stage:
    """A process that takes the device of a stage, and keeps it for some seconds."""

    def __init__(
        self, site: Site, folder: Path, *, seconds: float = 0, wait_s: str = "null"
    ) -> None:
        prefect = site.services.prefect
        env = {**site.env, "PREFECT_API_URL": prefect.url, "PREFECT_API_AUTH_STRING": prefect.auth}
        self.output = folder / f"{time.monotonic_ns()}.out"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", STAGE, str(folder), wait_s, str(seconds)],
                cwd=PROJECT,
                env=env,
                stdout=out,
                stderr=out,
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def says(self, words: str, limit_s: float = 120) -> None:
        deadline = time.monotonic() + limit_s
        while words not in self.text:
            assert time.monotonic() < deadline, self.text
            assert self.process.poll() is None or words in self.text, self.text
            time.sleep(0.1)


@pytest.fixture
def stage(busy_site: Site, tmp_path: Path) -> Iterator[Any]:
    """Start stages; end those that still run."""
    stages: list[Stage] = []

    def start(**how: Any) -> Stage:
        stages.append(Stage(busy_site, tmp_path, **how))
        return stages[-1]

    yield start
    for each in stages:
        each.process.kill()
        each.process.wait()


def test_a_stage_waits_for_the_device_of_another_run(
    busy_site: Site, stage: Any, tmp_path: Path
) -> None:
    first = stage(seconds=600)
    first.says("has it")
    second = stage()
    second.says(f"waits: {NAME} is in use by another run")
    impatient = stage(wait_s="0")
    impatient.says(f"busy: {NAME} is in use by another run")
    (tmp_path / "end").touch()
    second.says("done")
    first.says("done")
    limit = busy_site.services.prefect.get(f"/v2/concurrency_limits/{NAME}")
    assert (limit["limit"], limit["active_slots"]) == (1, 0)


def test_the_user_may_give_a_device_more_slots(busy_site: Site, stage: Any) -> None:
    stage().says("done")
    url = f"/v2/concurrency_limits/{NAME}"
    busy_site.services.prefect.call("PATCH", url, {"limit": 2})
    try:
        stage(seconds=600).says("has it")
        stage().says("done")
    finally:
        busy_site.services.prefect.call("PATCH", url, {"limit": 1})


def test_the_slot_of_a_killed_run_is_freed(busy_site: Site, stage: Any) -> None:
    first = stage(seconds=600)
    first.says("has it")
    first.process.kill()
    second = stage()
    second.says("waits: ")
    second.says("done", LEASE_S + 300)


def test_a_run_that_waits_for_a_device_ends_on_sigterm(
    busy_site: Site, stage: Any, tmp_path: Path
) -> None:
    stage(seconds=600).says("has it")
    argv = [sys.executable, str(SCRIPT), str(busy_site.services.runs), "waiting"]
    output = tmp_path / "waiting.out"
    with output.open("wb") as out:
        env = busy_site.env | {"PYTHONPATH": str(PROJECT)}
        run = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=out, stderr=out)
    deadline = time.monotonic() + 120
    while f"waits: {NAME}" not in output.read_text():
        assert time.monotonic() < deadline, output.read_text()
        assert run.poll() is None, output.read_text()
        time.sleep(0.1)
    run.terminate()
    assert run.wait(30) == 143, output.read_text()
    query = {"flow_runs": {"name": {"any_": ["tiny-waiting"]}}}
    (flow_run,) = busy_site.services.prefect.post("/flow_runs/filter", query)
    assert flow_run["state_type"] == "CRASHED"


def test_a_stage_ends_well_when_the_server_is_gone_and_its_slot_is_freed_later(
    tmp_path: Path,
) -> None:
    site = Site.at(tmp_path / "runs")
    try:
        site.require("up")
        holder = Stage(site, tmp_path, seconds=10)
        holder.says("has it")
        record = record_of("prefect", site.services.home)
        assert record is not None
        os.kill(record.pid, signal.SIGKILL)
        holder.says("done", 300)
        assert holder.process.wait(60) == 0
        assert "has not released a slot" in holder.text
        site.require("up")  # the leases are on disk
        later = Stage(site, tmp_path)
        later.says("done", LEASE_S + 300)
    finally:
        site.command("down")
