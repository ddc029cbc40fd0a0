"""A run on a full disk ends with one error: the file, the free space, what to type."""

from __future__ import annotations

import logging
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flows.cli.bootstrap import ShortTracebacks, quiet_logging
from flows.cli.config import compose_config
from flows.delivery.run_delivery import Untracked
from flows.orchestration.flow_run import FlowRun, in_this_process
from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Origin
from tasks.tracking.tracker import Tracker
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


def test_the_error_of_a_stage_stays_when_the_summary_cannot_be_written(flow_run: FlowRun) -> None:
    def stages(run: FlowRun) -> None:
        raise ArtifactError("tensor a is missing")

    with files_of(100), pytest.raises(ArtifactError, match="tensor a is missing"):
        flow_run.run("title", stages)


def test_a_full_database_is_reported_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MLflow raises the error of its database with the SQL, and logs it with its traceback."""
    quiet_logging()
    tracker = Tracker(f"sqlite:///{tmp_path / 'db'}", "e", tmp_path / "files", tmp_path / "outbox")
    _ = tracker.experiment_id
    with tracker.flow("f", {"a": 1}, "a: 1", {}), tracker.stage("s", ORIGIN) as stage:
        with files_of((tmp_path / "db").stat().st_size):
            for step in range(40):
                stage.metrics({f"a/{number}": step for number in range(20)}, step)
            line = tracker.settle()
        assert re.search(r"does not answer \(.*(database or disk is full|disk I/O error)\)", line)
    assert "Traceback" not in caplog.text
    assert "SQL" not in caplog.text


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


RECORDED = """
import sys, time
from pathlib import Path
from tasks.tracking.tracker import Tracker

disk = Path(sys.argv[1])
database = f"sqlite:///{disk}/mlflow.db"
(disk / "neighbour").open("wb", buffering=0).write(bytes(4 << 20))
tracker = Tracker(database, "e", disk / "files", Path(sys.argv[2]))
started = time.monotonic()
with tracker.flow("f", {}, "", {}):
    print(tracker.settle())
print("seconds", time.monotonic() - started)
"""


@pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it can")
def test_the_outbox_does_not_wait_for_a_full_disk(tmp_path: Path) -> None:
    """MLflow would try to open its database for 100 s."""
    disk, outbox = tmp_path / "disk", tmp_path / "outbox"
    disk.mkdir()
    script = 'mount -t tmpfs -o size=1m none "$1" && exec "$2" -c "$3" "$1" "$4"'
    command = [*ALONE, "sh", "-c", script, "sh", str(disk), sys.executable, RECORDED, str(outbox)]
    ended = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr
    assert "does not answer (the disk is full): " in ended.stdout
    assert float(ended.stdout.rpartition("seconds ")[2]) < 20


def test_a_full_disk_is_logged_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    LOG.addFilter(shorten := ShortTracebacks())
    try:
        with Path("/dev/full").open("w") as full:
            full.write("x")
    except OSError:
        LOG.exception("flow run failed")
    finally:
        LOG.removeFilter(shorten)
    assert "flow run failed" in caplog.text
    assert "Traceback" not in caplog.text
