"""torchrun starts each rank in its own session; one of them dies."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.core.errors import StageProcessError
from tasks.process.launch import launch, python_child
from tasks.process.multinode import rendezvous
from tests.conftest import PROJECT
from tests.process.conftest import alive, pids

RANK = """
import os, signal, sys, time
sys.stdout.write(f"in session {os.getsid(0)} is pid {os.getpid()}\\n")  # one piece: two ranks write
time.sleep(2)
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


def test_a_rank_that_is_killed_ends_the_others(tmp_path: Path, log: logging.Logger) -> None:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    log_path = tmp_path / "train.log"
    with rendezvous(None) as (meet, env):
        argv = python_child("torch.distributed.run", *meet, "--nproc-per-node", "2", str(path))
        with pytest.raises(StageProcessError, match="rank 1 .*SIGKILL") as caught:
            launch(argv, stage="train", log=log, log_path=log_path, env=env)
    assert caught.value.reason == "exit"
    text = log_path.read_text()
    ranks = pids("is pid", text)
    assert len(ranks) == 2
    assert sorted(pids("in session", text)) == sorted(ranks)
    assert not any(alive(pid) for pid in ranks)


CONNECTED = """
import os, psutil, sys, torch
from tasks.training.engine.deepspeed_engine import Ranks
ranks = Ranks(timeout_s=60, device="cpu")
assert ranks.total(torch.tensor([ranks.rank + 1.0])).item() == 3.0
for process in (psutil.Process(), psutil.Process(os.getppid())):
    for socket in process.net_connections(kind="inet"):
        if socket.status == psutil.CONN_LISTEN:
            sys.stdout.write(f"listens on {socket.laddr.ip}\\n")  # in one piece: two ranks write
sys.stdout.write(f"counted {ranks.all_objects(ranks.rank)}\\n")
sys.stdout.flush()
ranks.leave()  # or Gloo's threads may abort the process as it ends
"""


@pytest.mark.slow
def test_ranks_of_one_machine_listen_on_loopback_only(tmp_path: Path, log: logging.Logger) -> None:
    path = tmp_path / "connected.py"
    path.write_text(CONNECTED)
    with rendezvous(None) as (meet, env):
        folder = Path(env["PLUMBLINE_RANKS_FILE"]).parent
        assert folder.stat().st_mode & 0o077 == 0
        argv = python_child("torch.distributed.run", *meet, "--nproc-per-node", "2", str(path))
        launch(argv, stage="train", log=log, log_path=tmp_path / "train.log", env=env)
    assert not folder.exists()
    text = (tmp_path / "train.log").read_text()
    assert text.count("counted [0, 1]") == 2
    assert set(re.findall(r"listens on (\S+)", text)) <= {"127.0.0.1", "::1"}


def test_a_rank_that_ends_itself_has_its_status_and_its_output() -> None:
    """Whatever threads of libraries are still running."""
    argv = [sys.executable, "-m", "tests.process.ending_program", "3"]
    ended = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr, ended.stdout) == (3, "", "left\nat exit\n")
