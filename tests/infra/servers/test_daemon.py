"""Background processes: found again, left alone when not ours, stopped with their family."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from infra.servers.daemon import Daemon, record_of, start, stop, wait_ready
from tests.verify.serving import free_port

# Answers on a port, and has a child that ignores SIGTERM.
SERVER = """
import socket, subprocess, sys, time
stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True)"
child = subprocess.Popen([sys.executable, "-c", stubborn + "; time.sleep(300)"], stdout=-1)
child.stdout.readline()
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True:
    server.accept()[0].close()
"""


def answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    port = free_port()
    argv = [sys.executable, "-c", SERVER, str(port)]
    yield Daemon("echo", argv, dict(os.environ), partial(answers, port), port=port, start_s=30)
    stop("echo", tmp_path, grace_s=0.1)


def test_started_once_and_stopped_with_its_children(daemon: Daemon, tmp_path: Path) -> None:
    record = start(daemon, tmp_path, tmp_path)
    wait_ready(daemon, tmp_path)
    assert start(daemon, tmp_path, tmp_path) == record == record_of("echo", tmp_path)
    family = [psutil.Process(record.pid), *psutil.Process(record.pid).children()]
    assert len(family) == 2
    assert stop("echo", tmp_path, grace_s=0.5)
    psutil.wait_procs(family, timeout=5)
    assert [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] == []
    assert record_of("echo", tmp_path) is None
    assert not stop("echo", tmp_path)
    socket.create_server(("127.0.0.1", daemon.port or 0)).close()  # its port is free


def test_another_process_with_a_recycled_id_is_not_touched(tmp_path: Path) -> None:
    bystander = psutil.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        record = {"pid": bystander.pid, "started": bystander.create_time() - 3600, "port": None}
        (tmp_path / "echo.json").write_text(json.dumps(record))
        assert record_of("echo", tmp_path) is None
        assert not stop("echo", tmp_path)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()
