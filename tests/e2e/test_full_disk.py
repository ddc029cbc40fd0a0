"""A run on a full disk ends with one error: the file, the free space, what to type."""

from __future__ import annotations

import logging
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.cli.config import compose_config
from flows.delivery.run_delivery import Untracked
from flows.orchestration.flow_run import FlowRun, in_this_process
from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Origin
from tests.conftest import PROJECT

ORIGIN = Origin("k", "s", "0")
LOG = logging.getLogger("tests.full_disk")
ALONE = ["unshare", "-rm"]


def _why_not() -> str:
    """Return why no file system of our own can be mounted here, or an empty string."""
    if shutil.which("unshare") is None:
        return "no `unshare` here"
    probe = [*ALONE, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/tmp"]
    ended = subprocess.run(probe, capture_output=True, text=True, timeout=30)
    return f"no file system of our own can be mounted here: {ended.stderr}" * bool(ended.returncode)


WHY_NOT = _why_not()


@contextmanager
def files_of(nbytes: int) -> Iterator[None]:
    """Let this process write files of at most so many bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def flow_run(tmp_path: Path) -> FlowRun:
    overrides = ["source=s", f"out={tmp_path / 'out'}", f"paths.runs={tmp_path / 'runs'}"]
    composed = compose_config(overrides, config_name="deliver")
    host = in_this_process("0123456789", LOG)
    return FlowRun.begin("deliver", composed, host, tracker=Untracked())


def test_the_summary_of_a_run_on_a_full_disk_does_not_hide_its_error(
    flow_run: FlowRun, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither a file of a stage nor the summary can be written."""

    def stages(run: FlowRun) -> None:
        (run.mechanism.logs / "a.log").write_text("x" * 5000)

    with files_of(100), pytest.raises(ArtifactError) as caught:
        flow_run.run("title", stages)
    report = caught.value.report()
    assert "cannot write: File too large; " in report
    assert " GB are free there" in report
    assert "-> ulimit -f unlimited; or another file system: paths.runs=" in report
    assert str(flow_run.composed.runs) in report
    assert "the summary of this run could not be written" in caplog.text


FULL = """
import sys
from flows.cli.entry import run_main

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
        lines = ended.stderr.splitlines()
        assert lines[0].startswith(
            f"{tmp_path}/runs: cannot write: No space left on device; 0.00 G"
        )
        assert lines[1].startswith("  -> free some space, or put the runs elsewhere: paths.runs=")
        assert len(lines) == 2
    else:
        assert "RuntimeError: Server error" in ended.stderr
