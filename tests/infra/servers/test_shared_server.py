"""Stages of several runs that wait for a device at the server of `make up`."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows.orchestration.devices import LEASE_S
from tests.infra.requirements_files import PROJECT
from tests.infra.servers.site import Site

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


def test_the_slot_of_a_killed_run_is_freed(busy_site: Site, stage: Any) -> None:
    first = stage(seconds=600)
    first.says("has it")
    first.process.kill()
    second = stage()
    second.says("waits: ")
    second.says("done", LEASE_S + 300)
