"""Exit statuses after signals, without Prefect; `test_prefect_server.py` has them with it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from tests.process.conftest import Script

PROGRAM = """
import sys, time
from flows.cli.entry import exit_on_signals
with exit_on_signals():
    try:
        print("ready", flush=True)
        {body}
    finally:
        time.sleep(0.5)
        print("cleaned up", flush=True)
sys.exit(7)
"""

WAIT = "time.sleep(60)"
SWALLOW = """
        try:
            time.sleep(60)
        except BaseException:
            pass
"""


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["ctrl-c", "sigterm", "hangup"],
)
@pytest.mark.parametrize(
    ("body", "times"),
    [
        pytest.param(WAIT, 1, id="plain-1", marks=pytest.mark.slow),
        pytest.param(WAIT, 3, id="plain-3", marks=pytest.mark.slow),
        pytest.param(SWALLOW.strip(), 1, id="swallowed-1", marks=pytest.mark.slow),
        pytest.param(SWALLOW.strip(), 3, id="swallowed-3"),  # includes the others
    ],
)
def test_status(
    script: Callable[..., Script], number: signal.Signals, status: int, body: str, times: int
) -> None:
    program = script("-c", PROGRAM.format(body=body))
    program.says("ready")
    for _ in range(times):
        program.signal_group(number)
    assert program.process.wait(20) == status
    assert "cleaned up" in program.text
    assert "Traceback" not in program.text


def test_nohup_is_respected(script: Callable[..., Script]) -> None:
    program = script("-c", PROGRAM.format(body="time.sleep(2)"), nohup=True)
    program.says("ready")
    program.signal_group(signal.SIGHUP)
    assert program.process.wait(20) == 7
    assert "cleaned up" in program.text


def test_without_a_signal_nothing_changes(script: Callable[..., Script]) -> None:
    assert script("-c", PROGRAM.format(body="pass")).process.wait(20) == 7


def test_other_errors_are_left_alone(script: Callable[..., Script]) -> None:
    program = script("-c", PROGRAM.format(body="raise ValueError('mine')"))
    assert program.process.wait(20) == 1
    assert "ValueError: mine" in program.text
