"""Runs share a folder; who needs it alone waits, and so do runs that want the same artifact."""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.core.errors import BusyError
from tasks.pipeline.locks import FOREVER, Patience, devices, hold, release, reuse_or_own, share
from tests.process.conftest import Script

HOLDER = """
import sys, time
from pathlib import Path
from tasks.pipeline.locks import hold
with hold(Path(sys.argv[1])) as held:
    if sys.argv[3:] == ["share"]:
        held.share()
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_the_second_is_told_who_is_first_and_waits_until_a_kill_frees_it(
    script: Callable[..., Script], runs: Path
) -> None:
    first = script("-c", HOLDER, str(runs), "60")
    first.says("held")
    with pytest.raises(BusyError) as caught, hold(runs):
        pytest.fail("two processes hold one folder")
    assert f"pid {first.process.pid}" in str(caught.value)
    assert str(runs) in str(caught.value)
    assert "paths.wait_s=null" in caught.value.hint
    begin = time.monotonic()
    with pytest.raises(BusyError, match=r"0\.5 s"), hold(runs, Patience(0.5)):
        pytest.fail("two processes hold one folder")
    assert time.monotonic() - begin > 0.5
    lines: list[str] = []
    threading.Timer(1.0, first.process.kill).start()
    with hold(runs, Patience(30, lines.append)):
        assert len(lines) == 1
        assert f"waits: {runs} is in use by another run: pid {first.process.pid}" in lines[0]
        assert f'"pid": {os.getpid()}' in (runs / ".lock").read_text()
    assert (runs / ".lock").read_text() == ""


def test_its_holder_may_take_it_twice_and_shows_no_password(
    script: Callable[..., Script], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rlhf.py", "tracking.uri=postgresql://me:hidden@db/x"])
    with hold(runs):
        assert "tracking.uri=postgresql://me:***@db/x" in (runs / ".lock").read_text()
        with hold(runs / "../runs"):
            pass
        second = script("-c", HOLDER, str(runs), "0")  # the inner block did not free it
        assert second.process.wait(20) == 1
        assert "BusyError" in second.text


def test_runs_share_a_folder_and_one_that_needs_it_alone_waits_for_all(
    script: Callable[..., Script], runs: Path
) -> None:
    others = [script("-c", HOLDER, str(runs), "60", "share") for _ in range(2)]
    for other in others:
        other.says("held")
    with hold(runs) as held:
        assert not held.alone
    with pytest.raises(BusyError) as caught, hold(runs, alone=True):
        pytest.fail("a prune while runs use the folder")
    assert all(f"pid {other.process.pid}" in str(caught.value) for other in others)
    others[0].process.kill()
    others[0].process.wait(5)
    with pytest.raises(BusyError) as caught, hold(runs, alone=True):
        pytest.fail("a prune while a run uses the folder")
    assert f"pid {others[0].process.pid}" not in str(caught.value)
    others[1].process.kill()
    others[1].process.wait(5)
    with hold(runs, alone=True) as held:
        assert held.alone


def test_a_run_on_another_node_is_named(runs: Path) -> None:
    """On a shared folder the lock is visible from here; the process is not."""
    runs.mkdir()
    other = {"pid": 1, "host": "node7", "command": "rlhf.py", "started": "today"}
    with (runs / ".lock").open("w") as lock:
        lock.write(json.dumps(other) + "\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(BusyError, match="pid 1 on node7"), hold(runs, alone=True):
            pytest.fail("a run on node7 uses the folder")


MAKER = """
import sys, time
from pathlib import Path
from tasks.pipeline.locks import FOREVER, Patience, reuse_or_own, share
final, seconds = Path(sys.argv[1]), float(sys.argv[2])
say = Patience(None, lambda line: print(line, flush=True))
content = reuse_or_own(final, lambda: final.read_text() if final.exists() else None, say)
print("found", content, flush=True)
if content is None:
    time.sleep(seconds)
    final.parent.mkdir(parents=True, exist_ok=True)
    final.write_text("made")
    share(final, FOREVER)
print("done", flush=True)
time.sleep(float(sys.argv[3]))
"""


def test_the_second_waits_for_the_artifact_of_the_first_and_reuses_it(
    script: Callable[..., Script], runs: Path
) -> None:
    """If the first is killed, the second makes it."""
    final, other = runs / "artifacts" / "shards" / "key", runs / "artifacts" / "shards" / "other"
    first = script("-c", MAKER, str(final), "5", "60")  # it goes on with what it has made
    killed = script("-c", MAKER, str(other), "60", "0")
    first.says("found None")
    killed.says("found None")
    second, heir = (script("-c", MAKER, str(path), "0", "0") for path in (final, other))
    heir.says("waits: ")
    killed.process.kill()
    heir.says("found None")
    heir.says("done")
    second.says("waits: ")
    second.says("found made")
    assert second.process.wait(30) == 0
    assert first.process.poll() is None


def test_an_artifact_in_use_is_not_replaced(script: Callable[..., Script], runs: Path) -> None:
    final = runs / "artifacts" / "shards" / "key"
    user = script("-c", MAKER, str(final), "0", "60")
    user.says("done")
    try:
        with pytest.raises(BusyError, match="key"):
            reuse_or_own(final, None, Patience(0.0))
        assert reuse_or_own(final, final.read_text, Patience(0.0)) == "made"
        user.process.kill()
        user.process.wait(5)
        assert reuse_or_own(final, None, Patience(30.0)) is None
        assert reuse_or_own(final, None, FOREVER) is None  # a later step may make it again
        share(final, FOREVER)
    finally:
        release()


def test_a_device_is_for_one_run_at_a_time(script: Callable[..., Script], runs: Path) -> None:
    text = """
import sys, time
from pathlib import Path
from tasks.pipeline.locks import FOREVER, devices
with devices(Path(sys.argv[1]), ["gpu-1", "gpu-0"], FOREVER):
    print("held", flush=True)
    time.sleep(60)
"""
    other = script("-c", text, str(runs))
    other.says("held")
    with devices(runs, ["gpu-2"], Patience(0.0)):
        pass
    with pytest.raises(BusyError, match="gpu-1"), devices(runs, ["gpu-2", "gpu-1"], Patience(0.0)):
        pytest.fail("two runs use one GPU")
    other.process.kill()
    with devices(runs, ["gpu-0", "gpu-1"], Patience(30.0)):
        pass
