"""Services that fail to start, are stopped during a run, or are killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.servers.services import running as service
from infra.services import NAMES
from tasks.pipeline.locks import hold
from tests.infra.servers.conftest import Site

pytestmark = pytest.mark.slow


@pytest.fixture
def own_site(tmp_path: Path) -> Iterator[Site]:
    """Services that do not run yet, and are stopped at the end of the test."""
    site = Site.at(tmp_path / "runs")
    yield site
    site.command("down")


def test_the_queue_goes_on_after_down_and_after_kill_9(own_site: Site) -> None:
    """A run that is stopped in the middle must not hold the only slot of its deployment."""
    own_site.require("up")
    own_site.require("deploy")
    waiting = ["+exp=qlora", f"paths.runs={own_site.services.runs / 'planned'}"]
    with hold(own_site.services.runs / "planned", alone=True):
        stopped = running(own_site, waiting)
        queued = own_site.start_run("rlhf-qlora", own_site.overrides())
        assert "runs     1 ended as Crashed" in own_site.require("down")
        own_site.require("up")
        assert own_site.finished_run(stopped)["state_type"] == "CRASHED"
        assert own_site.finished_run(queued)["state_type"] == "COMPLETED"

        killed = running(own_site, waiting)
        for name in NAMES:
            daemon = service(name, own_site.services.home)
            assert daemon is not None
            for member in [daemon.process, *daemon.process.children(recursive=True)]:
                os.kill(member.pid, signal.SIGKILL)
        own_site.require("up")
        assert own_site.finished_run(killed)["state_type"] == "CRASHED"
        queued = own_site.start_run("rlhf-qlora", own_site.overrides())
        assert own_site.finished_run(queued)["state_type"] == "COMPLETED"


def running(site: Site, overrides: list[str]) -> str:
    """Start a flow run and wait until it waits for its folder. Returns its id."""
    run_id = site.start_run("rlhf-qlora", overrides)
    site.logged(run_id, "waits: ")
    return run_id
