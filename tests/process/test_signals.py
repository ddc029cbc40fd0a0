"""Exit statuses after signals."""

from __future__ import annotations

import signal
from collections.abc import Callable

from tests.process.conftest import Script

PROGRAM = """
import sys, time
from flows.cli.start import exit_on_signals
with exit_on_signals():
    try:
        print("ready", flush=True)
        {body}
    finally:
        time.sleep(0.5)
        print("cleaned up", flush=True)
sys.exit(7)
"""
SWALLOW = """
        try:
            time.sleep(60)
        except BaseException:
            pass
"""


def test_a_program_that_is_signalled_three_times_cleans_up_and_has_its_status(
    script: Callable[..., Script],
) -> None:
    """The program swallows the exception, and ends all the same."""
    code = PROGRAM.format(body=SWALLOW.strip())
    statuses = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}
    programs = {number: script("-c", code) for number in statuses}
    for number, program in programs.items():
        program.says("ready")
        for _ in range(3):
            program.signal_group(number)
    for number, program in programs.items():
        assert program.process.wait(20) == statuses[number]
        assert "cleaned up" in program.text
        assert "Traceback" not in program.text


def test_nohup_and_errors_of_the_program_are_respected(script: Callable[..., Script]) -> None:
    program = script("-c", PROGRAM.format(body="time.sleep(2)"), nohup=True)
    program.says("ready")
    program.signal_group(signal.SIGHUP)
    assert program.process.wait(20) == 7
    assert "cleaned up" in program.text
    failed = script("-c", PROGRAM.format(body="raise ValueError('mine')"))
    assert failed.process.wait(20) == 1
    assert "ValueError: mine" in failed.text
