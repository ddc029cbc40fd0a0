"""Runs share a folder; who needs it alone waits, and so do runs that want the same artifact."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tasks.core.errors import BusyError
from tasks.pipeline.locks import Patience, devices, hold, staging
from tests.process.conftest import Script

HOLDER = """
import sys, time
from pathlib import Path
from tasks.pipeline.locks import hold
with hold(Path(sys.argv[1]), alone=sys.argv[2] == "alone"):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_runs_share_a_folder_and_a_prune_waits_until_the_last_is_gone(
    script: Callable[..., Script], runs: Path
) -> None:
    others = [script("-c", HOLDER, str(runs), "shared") for _ in range(2)]
    for other in others:
        other.says("held")
    with hold(runs):
        pass
    with pytest.raises(BusyError) as caught, hold(runs, alone=True):
        pytest.fail("a prune while runs use the folder")
    assert all(f"pid {other.process.pid} " in str(caught.value) for other in others)
    others[0].process.kill()
    others[0].process.wait(5)
    lines: list[str] = []
    threading.Timer(1.0, others[1].process.kill).start()
    with hold(runs, Patience(60, lines.append), alone=True):
        assert len(lines) == 1
        assert f"pid {others[1].process.pid} " in lines[0]
        assert f"pid {others[0].process.pid} " not in lines[0]
    assert (runs / ".lock").read_text() == ""
    prune = script("-c", HOLDER, str(runs), "alone")
    prune.says("held")
    with pytest.raises(BusyError, match=f"pid {prune.process.pid} ") as caught, hold(runs):
        pytest.fail("a run while a prune removes artifacts")
    assert "paths.wait_s=null" in caught.value.hint


def test_its_holder_may_take_it_twice_and_shows_no_password(
    script: Callable[..., Script], runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rlhf.py", "tracking.uri=postgresql://me:hidden@db/x"])
    with hold(runs):
        assert "tracking.uri=postgresql://me:***@db/x" in (runs / ".lock").read_text()
        with hold(runs / "../runs"):
            pass
        second = script("-c", HOLDER, str(runs), "alone")  # the inner block did not free it
        assert second.process.wait(20) == 1
        assert f"pid {os.getpid()} " in second.text


MAKER = """
import sys, time
from pathlib import Path
from tasks.pipeline.locks import Patience, staging
final, seconds = Path(sys.argv[1]), float(sys.argv[2])
with staging(final, Patience(None, lambda line: print(line, flush=True))) as work:
    print("owns", *work.iterdir(), flush=True)
    (work / "half").touch()
    time.sleep(seconds)
    work.rename(final)
print("done", flush=True)
"""


def test_one_run_makes_an_artifact_and_the_next_goes_on_after_a_kill(
    script: Callable[..., Script], runs: Path
) -> None:
    final = runs / "artifacts" / "shards" / "key"
    killed = script("-c", MAKER, str(final), "60")
    killed.says("owns")
    with pytest.raises(BusyError, match="key"), staging(final, Patience(0.0)):
        pytest.fail("two processes make one artifact")
    heir = script("-c", MAKER, str(final), "0")
    heir.says("waits: ")
    killed.process.kill()
    heir.says("owns\n")  # nothing of what the killed run has left
    heir.says("done")
    assert [path.name for path in final.parent.iterdir()] == ["key"]


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
