"""torchrun starts each rank in its own session; one of them dies, another ignores signals."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from tasks.core.errors import StageProcessError
from tasks.process.launch import launch, python_child
from tasks.process.multinode import rendezvous
from tests.process.conftest import alive, pids

RANK = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdout.write(f"in session {os.getsid(0)} is pid {os.getpid()}\\n")  # one piece: two ranks write
time.sleep(2)
if os.environ["RANK"] == "1":
    sys.stdout.write(f"died at {int(time.time())}\\n")
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("rank 1 had an accident")
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "last"),
    [
        pytest.param(
            "raises", "RuntimeError: rank 1 had an accident", marks=pytest.mark.slow
        ),  # the next test has an exception
        ("killed", r"rank 1 \(pid \d+\) was killed by SIGKILL"),
    ],
)
def test_a_rank_that_dies(tmp_path: Path, log: logging.Logger, how: str, last: str) -> None:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    log_path = tmp_path / "train.log"
    with rendezvous(None) as (meet, env):
        argv = python_child("torch.distributed.run", *meet, "--nproc-per-node", "2", str(path), how)
        with pytest.raises(StageProcessError, match=last) as caught:
            launch(argv, stage="train", log=log, log_path=log_path, env=env)
    assert caught.value.reason == "exit"
    assert re.fullmatch(last, caught.value.details[-1])
    text = log_path.read_text()
    (died_at,) = pids("died at", text)
    assert time.time() - died_at < 30
    ranks = pids("is pid", text)
    assert len(ranks) == 2
    assert sorted(pids("in session", text)) == sorted(ranks)
    assert not any(alive(pid) for pid in ranks)


def test_torchruns_epilogue_is_only_in_the_file(
    tmp_path: Path, log: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    path, log_path = tmp_path / "rank.py", tmp_path / "train.log"
    path.write_text("raise RuntimeError('an accident')\n")
    argv = python_child("torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(path))
    log.setLevel(logging.DEBUG)
    with pytest.raises(StageProcessError) as caught, caplog.at_level(logging.DEBUG):
        launch(argv, stage="train", log=log, log_path=log_path)
    assert caught.value.details[-1] == "RuntimeError: an accident"
    assert "RuntimeError: an accident" in caplog.text
    assert "ChildFailedError" in log_path.read_text()
    assert "ChildFailedError" not in caplog.text
    assert "exitcode" not in caplog.text


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
