"""Services that fail to start, are stopped during a run, or are killed."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flows.cli.lock import hold
from flows.orchestration.services import record_of, record_path
from infra.services import NAMES
from tests.infra.site import Site


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """Services that do not run yet, and are stopped at the end of the test."""
    site = Site.at(tmp_path / "runs")
    yield site
    site.command("down")


def test_a_failed_up_leaves_nothing_behind(own_site: Site) -> None:
    with socket.create_server(("127.0.0.1", own_site.services.mlflow_port)):
        up = own_site.command("up")
    assert up.returncode == 1
    assert f"port {own_site.services.mlflow_port} for mlflow is taken" in up.stderr
    assert [name for name in NAMES if record_of(name, own_site.services.home)] == []
    leftover = [p for p in psutil.process_iter() if str(own_site.services.prefect_port) in argv(p)]
    assert leftover == []


def test_a_server_without_a_login_is_not_used(own_site: Site) -> None:
    """Started by an older release, or its file was removed."""
    home = own_site.services.home
    home.mkdir(parents=True)
    process = psutil.Process()
    record = {"pid": process.pid, "started": process.create_time()}
    record_path("prefect", home).write_text(
        json.dumps({**record, "port": own_site.services.prefect_port})
    )
    try:
        up = own_site.command("up")
    finally:
        record_path("prefect", home).unlink()  # `down` would stop this process
    assert up.returncode == 1
    assert "has no login" in up.stderr
    assert "make down, then make up" in up.stderr


def argv(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


@pytest.mark.slow
def test_the_queue_goes_on_after_down_and_after_kill_9(own_site: Site) -> None:
    """A run that is stopped in the middle must not hold the only slot of its deployment."""
    own_site.require("up")
    own_site.require("deploy")
    waiting = ["+exp=qlora", f"paths.runs={own_site.services.runs / 'planned'}"]
    with hold(own_site.services.runs / "planned"):
        stopped = running(own_site, waiting)
        queued = own_site.start_run("rlhf-qlora", own_site.overrides())
        assert "runs     1 ended as Crashed" in own_site.require("down")
        own_site.require("up")
        assert own_site.finished_run(stopped)["state_type"] == "CRASHED"
        assert own_site.finished_run(queued)["state_type"] == "COMPLETED"

        killed = running(own_site, waiting)
        for name in NAMES:
            record = record_of(name, own_site.services.home)
            assert record is not None
            process = record.process()
            assert process is not None
            for member in [process, *process.children(recursive=True)]:
                os.kill(member.pid, signal.SIGKILL)
        own_site.require("up")
        assert own_site.finished_run(killed)["state_type"] == "CRASHED"
        queued = own_site.start_run("rlhf-qlora", own_site.overrides())
        assert own_site.finished_run(queued)["state_type"] == "COMPLETED"


def running(site: Site, overrides: list[str]) -> str:
    """Start a flow run and wait until it waits for its folder. Returns its id."""
    run_id = site.start_run("rlhf-qlora", overrides)
    site.logged(run_id, "waits until")
    return run_id
