"""Start real processes, and see whether they have ended."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import PROJECT

STUBBORN = """
import os, signal, sys, time
os.setsid()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("stubborn", os.getpid(), flush=True)
time.sleep(600)
"""
"""A process that leaves its session and ignores signals."""

FAMILY = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {STUBBORN!r}])
time.sleep(600)
"""
"""A process with such a child."""


def alive(pid: int) -> bool:
    """Return True if a process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat[stat.rindex(")") + 2] not in "ZX"


def until(condition: Callable[[], object], limit_s: float) -> float:
    """Wait for a condition and return the seconds. Fails after `limit_s`."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < limit_s, f"not within {limit_s} s"
        time.sleep(0.05)
    return time.monotonic() - begin


def pids(name: str, text: str) -> list[int]:
    """Return the process ids that were printed as `name <pid>`."""
    return [int(pid) for pid in re.findall(rf"\b{name} (\d+)", text)]


@pytest.fixture
def log() -> logging.Logger:
    """A logger whose lines `caplog` sees."""
    logger = logging.getLogger("test.process")
    logger.setLevel(logging.INFO)
    return logger


class Script:
    """A Python script in its own process group, with its output in a file."""

    def __init__(
        self, output: Path, *argv: str, env: dict[str, str] | None = None, nohup: bool = False
    ) -> None:
        self.output = output
        # Ignored signals are inherited, and the suite itself may run under nohup.
        hangup = signal.SIG_IGN if nohup else signal.SIG_DFL
        with output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-u", *argv],
                cwd="/",  # the project has to be found from anywhere
                env={**os.environ, "PYTHONPATH": str(PROJECT), **(env or {})},
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGHUP, hangup),
            )  # fmt: skip

    @property
    def text(self) -> str:
        """Output so far."""
        return self.output.read_text(errors="replace")

    def says(self, words: str, limit_s: float = 60.0) -> None:
        """Wait until the output has `words`."""

        def printed() -> bool:
            assert self.process.poll() is None or words in self.text, self.text
            return words in self.text

        until(printed, limit_s)

    def signal_group(self, number: int) -> None:
        """Send a signal to the whole process group, as a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, number)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[Callable[..., Script]]:
    """Start scripts; those that still run at the end of the test are killed."""
    started: list[Script] = []

    def start(*argv: str, env: dict[str, str] | None = None, nohup: bool = False) -> Script:
        output = tmp_path / f"script-{len(started)}.out"
        started.append(Script(output, *argv, env=env, nohup=nohup))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
        running.process.wait(10)
