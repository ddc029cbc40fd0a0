"""torchrun starts each rank in its own session; one of them dies, another ignores signals."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from tasks.core.errors import StageProcessError
from tasks.process.launch import launch, python_child
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
        ("raises", "RuntimeError: rank 1 had an accident"),
        ("killed", r"rank 1 \(pid \d+\) was killed by SIGKILL"),
    ],
)
def test_a_rank_that_dies(tmp_path: Path, log: logging.Logger, how: str, last: str) -> None:
    path = tmp_path / "rank.py"
    path.write_text(RANK)
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    argv = python_child(*torchrun, str(path), how)
    log_path = tmp_path / "train.log"
    with pytest.raises(StageProcessError, match=last) as caught:
        launch(argv, stage="train", log=log, log_path=log_path)
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
    with pytest.raises(StageProcessError) as caught:
        launch(argv, stage="train", log=log, log_path=log_path)
    assert caught.value.details[-1] == "RuntimeError: an accident"
    assert "RuntimeError: an accident" in caplog.text
    assert "ChildFailedError" in log_path.read_text()
    assert "ChildFailedError" not in caplog.text
    assert "exitcode" not in caplog.text
