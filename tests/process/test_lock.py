"""One run at a time in one folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flows.cli.lock import hold
from tasks.core.errors import BusyError
from tests.process.conftest import Script

HOLDER = """
import sys, time
from pathlib import Path
from flows.cli.lock import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


def test_the_second_is_told_who_is_first(script: Callable[..., Script], runs: Path) -> None:
    first = script("-c", HOLDER, str(runs), "60")
    first.says("held")
    with pytest.raises(BusyError) as caught, hold(runs):
        pytest.fail("two processes hold one folder")
    message = str(caught.value)
    assert f"pid {first.process.pid}" in message
    assert str(runs) in message
    assert "60" in message.split(": ", 1)[1]  # the command
    assert "paths.wait_s=600" in caught.value.hint
    assert "paths.runs=" in caught.value.hint


def test_kill_9_frees_it(script: Callable[..., Script], runs: Path) -> None:
    first = script("-c", HOLDER, str(runs), "60")
    first.says("held")
    first.process.kill()
    first.process.wait(5)
    with hold(runs):
        assert f'"pid": {os.getpid()}' in (runs / ".lock").read_text()


def test_waiting_for_it(script: Callable[..., Script], runs: Path) -> None:
    first = script("-c", HOLDER, str(runs), "1.5")
    first.says("held")
    begin = time.monotonic()
    with hold(runs, wait_s=30):
        assert 0.5 < time.monotonic() - begin < 15


def test_waiting_in_vain(script: Callable[..., Script], runs: Path) -> None:
    script("-c", HOLDER, str(runs), "60").says("held")
    begin = time.monotonic()
    with pytest.raises(BusyError, match=r"waited 0\.5 s"), hold(runs, wait_s=0.5):
        pytest.fail("two processes hold one folder")
    assert time.monotonic() - begin > 0.5


def test_it_is_free_again_after_the_block(runs: Path) -> None:
    for _ in range(2):
        with hold(runs):
            pass
    assert (runs / ".lock").read_text() == ""


def test_its_holder_may_take_it_twice(script: Callable[..., Script], runs: Path) -> None:
    with hold(runs):
        with hold(runs / "../runs"):
            pass
        second = script("-c", HOLDER, str(runs), "0")  # the inner block did not free it
        assert second.process.wait(20) == 1
        assert "BusyError" in second.text


def test_a_failed_block_frees_it(runs: Path) -> None:
    with pytest.raises(ZeroDivisionError), hold(runs):
        raise ZeroDivisionError
    with hold(runs):
        pass


def test_passwords_of_urls_are_not_shown(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rlhf.py", "tracking.uri=postgresql://me:hidden@db/x"])
    with hold(runs):
        assert "tracking.uri=postgresql://me:***@db/x" in (runs / ".lock").read_text()


def test_the_one_that_waits_says_for_whom(script: Callable[..., Script], runs: Path) -> None:
    first = script("-c", HOLDER, str(runs), "1.5")
    first.says("held")
    lines: list[str] = []
    with hold(runs, wait_s=30, on_wait=lines.append):
        pass
    (line,) = lines
    assert f"waits until {runs} is free, in use by pid {first.process.pid}" in line
