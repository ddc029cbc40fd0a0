"""A rank that has finished exits cleanly, whatever threads of libraries are still running."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.core.errors import StageProcessError
from tasks.process.launch import launch, python_child

PROJECT = Path(__file__).resolve().parents[2]


def _ended(*how: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.process.ending_program", *how]
    return subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_rank_that_returns_is_aborted_by_a_thread_of_gloo() -> None:
    """This is why `end_process` exists; should this fail with a later torch, it may not be needed.

    Of twenty that return one is not aborted, on a busy machine more.
    """
    tries = (_ended("returns") for _ in range(12))
    aborted = next((ended for ended in tries if ended.returncode), None)
    assert aborted is not None, "none of 12 was aborted"
    assert aborted.returncode == -signal.SIGABRT


def test_a_rank_that_ends_itself_has_its_status_and_its_output() -> None:
    ended = _ended("ends", "3")
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout == "left\nat exit\n"


def test_a_rank_that_fails_unforeseen_says_where(tmp_path: Path) -> None:
    log_path = tmp_path / "train.log"
    argv = python_child("tasks.training", str(tmp_path / "no job.json"))
    with pytest.raises(StageProcessError, match="FileNotFoundError.*no job.json") as caught:
        launch(argv, stage="train", log=logging.getLogger("test"), log_path=log_path)
    assert caught.value.returncode == 1
