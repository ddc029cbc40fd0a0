"""A rank that has finished exits cleanly, whatever threads of libraries are still running."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.core.errors import StageProcessError
from tasks.process.launch import launch, python_child
from tests.conftest import PROJECT


def test_a_rank_that_ends_itself_has_its_status_and_its_output() -> None:
    argv = [sys.executable, "-m", "tests.process.ending_program", "3"]
    ended = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout == "left\nat exit\n"


def test_a_rank_that_fails_unforeseen_says_where(tmp_path: Path) -> None:
    log_path = tmp_path / "train.log"
    argv = python_child("tasks.training", str(tmp_path / "no job.json"))
    with pytest.raises(StageProcessError, match="FileNotFoundError.*no job.json") as caught:
        launch(argv, stage="train", log=logging.getLogger("test"), log_path=log_path)
    assert caught.value.returncode == 1
