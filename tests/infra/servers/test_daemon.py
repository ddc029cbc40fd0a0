"""A service that a killed child of it, or another process with its id, must not confuse."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import psutil
import pytest

from flows.servers.services import running
from infra import services
from infra.services import Services

# Has a child that ignores SIGTERM.
PARENT = """
import subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)"
child = subprocess.Popen([sys.executable, "-c", stubborn + "; time.sleep(300)"], stdout=-1)
print(child.stdout.readline(), flush=True)
time.sleep(300)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Services:
    monkeypatch.setattr(services, "STOP_S", 0.5)
    site = Services(tmp_path)
    site.home.mkdir()
    return site


def test_a_service_is_stopped_with_its_children(site: Services) -> None:
    process = psutil.Popen([sys.executable, "-c", PARENT], stdout=-1)
    process.stdout.readline()
    record = json.dumps([process.pid, process.create_time(), None])
    (site.home / "worker.json").write_text(record)
    service = running("worker", site.home)
    assert service is not None
    family = [service.process, *service.process.children()]
    assert len(family) == 2
    assert site._stop("worker")
    psutil.wait_procs(family, timeout=5)
    assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert running("worker", site.home) is None
    assert not site._stop("worker")


def test_another_process_with_a_recycled_id_is_not_touched(site: Services) -> None:
    bystander = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        record = json.dumps([bystander.pid, bystander.create_time() - 3600, None])
        (site.home / "worker.json").write_text(record)
        assert not site._stop("worker")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
