"""A rank that has finished exits cleanly, whatever threads of libraries are still running."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import PROJECT


def test_a_rank_that_ends_itself_has_its_status_and_its_output() -> None:
    argv = [sys.executable, "-m", "tests.process.ending_program", "3"]
    ended = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")
    assert ended.stdout == "left\nat exit\n"
