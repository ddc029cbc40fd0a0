"""A run on a full disk ends with one error: the file, the free space, what to type."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT

ALONE = ["unshare", "-rm"]


def _why_not() -> str:
    """Return why no file system of our own can be mounted here, or an empty string."""
    if shutil.which("unshare") is None:
        return "no `unshare` here"
    probe = [*ALONE, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/tmp"]
    ended = subprocess.run(probe, capture_output=True, text=True, timeout=30)
    return f"no file system of our own can be mounted here: {ended.stderr}" * bool(ended.returncode)


WHY_NOT = _why_not()
FULL = """
import sys
from flows.cli.config import run_main

def job(composed, overrides):
    composed.runs.mkdir()
    try:
        (composed.runs / "neighbour").write_bytes(bytes(4 << 20))
    except OSError:
        pass
    raise RuntimeError("Server error '500 Internal Server Error'")

sys.exit(run_main("deliver", job, argv=["source=s", "out=o", "paths.runs=" + sys.argv[1]]))
"""


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can")
@pytest.mark.parametrize(("size", "ends"), [("1m", "full"), ("64m", "other")])
def test_an_error_of_a_server_on_a_full_disk(tmp_path: Path, size: str, ends: str) -> None:
    """A real file system of that size."""
    script = f'mount -t tmpfs -o size={size} none "$1" && exec "$2" -c "$3" "$1/runs"'
    command = [*ALONE, "sh", "-c", script, "sh", str(tmp_path), sys.executable, FULL]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    if ends == "full":
        first, hint = ended.stderr.splitlines()
        assert all(thing in first for thing in (f"{tmp_path}/runs", os.strerror(errno.ENOSPC)))
        assert "paths.runs=" in hint
    else:
        assert "500 Internal Server Error" in ended.stderr
