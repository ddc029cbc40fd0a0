"""Stages of several runs that wait for a device at the server of `make up`."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.infra.servers.site import Site
from tests.process.conftest import Script

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


@pytest.fixture
def stage(busy_site: Site, tmp_path: Path) -> Iterator[Any]:
    """Start processes that take the device of a stage for some seconds; end those that run."""
    started: list[Script] = []
    prefect = busy_site.services.prefect
    env = {**busy_site.env, "PREFECT_API_URL": prefect.url, "PREFECT_API_AUTH_STRING": prefect.auth}

    def start(*, seconds: float = 0, wait_s: str = "null") -> Script:
        output = tmp_path / f"{len(started)}.out"
        started.append(Script(output, "-c", STAGE, str(tmp_path), wait_s, str(seconds), env=env))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def test_a_stage_waits_for_the_device_of_another_run(
    busy_site: Site, stage: Any, tmp_path: Path
) -> None:
    first = stage(seconds=600)
    first.says("has it", 120)
    second = stage()
    second.says(f"waits: {NAME} is in use by another run", 120)
    stage(wait_s="0").says(f"busy: {NAME} is in use by another run", 120)
    (tmp_path / "end").touch()
    second.says("done")
    first.says("done")
    limit = busy_site.services.prefect.get(f"/v2/concurrency_limits/{NAME}")
    assert (limit["limit"], limit["active_slots"]) == (1, 0)
