"""What a child process says: its bytes taken apart into lines, events and a tail.

The full text goes to a file, a rate limited selection to the logger, the last lines stay in memory
for the error message, and events (`tasks/core/events.py`) come out of `feed` in the order they came
in. Values of environment variables whose names say that they are secret are written as `***`.
"""

from __future__ import annotations

import collections
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tasks.core import events
from tasks.process import torchrun_log

Log = logging.Logger | logging.LoggerAdapter[Any]

TAIL_LINES = 40
KEPT_LINES = 160
"""More than the tail, because torchrun's epilogue is taken out of it."""

TAIL_LINE_CHARACTERS = 2_000
LONGEST_LINE = 8 << 20
LINES_PER_S = 50.0
BURST_LINES = 200.0

_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|KEY|AUTH_STRING)(_|$)")
_SHORTEST_SECRET = 8


class Output:
    """The output of one child process. Use it as a context manager: it holds the log file open.

    Args:
        stage: prefix of the lines handed to `log`.
        log: logger that gets lines at INFO, at most about 50 a second, without torchrun's epilogue.
        log_path: file that gets every line; events are not among them.
    """

    def __init__(self, *, stage: str, log: Log, log_path: Path) -> None:
        self._stage, self._log, self._path = stage, log, log_path
        self._tail: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._lines = _Lines()
        self._budget = _Budget()
        self._secrets = secrets_of(os.environ)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        self._file = log_path.open("ab")

        self.closing: set[int] = set()
        """Process ids of the ranks that torchrun is ending, because another one failed."""
        self._epilogue = False

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._tell_suppressed()
        self._file.close()

    @property
    def tail(self) -> list[str]:
        """The last lines, oldest first."""
        return torchrun_log.ranks_own(self._tail)[-TAIL_LINES:]

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Take bytes as they come, an empty chunk for the end; give the events among them."""
        for line in self._lines.split(chunk):
            event = events.parse(line)
            if event is None:
                self._text(line)
                continue
            before = line[: line.find(events.PREFIX)]  # another process wrote on the same line
            if before.strip():
                self._text(before)
            yield event
        self._file.flush()

    def _text(self, line: str) -> None:
        for secret in self._secrets:
            line = line.replace(secret, "***")
        self._file.write(line.encode("utf-8", "replace") + b"\n")
        self._tail.append(line[:TAIL_LINE_CHARACTERS])
        if (pid := torchrun_log.closing_pid(line)) is not None:
            self.closing.add(pid)
        self._epilogue = self._epilogue or torchrun_log.is_verdict(line)
        if self._epilogue or not line.strip():
            return
        if self._budget.take():
            self._tell_suppressed()
            self._log.info("[%s] %s", self._stage, line)

    def _tell_suppressed(self) -> None:
        count = self._budget.suppressed
        if count:
            self._budget.suppressed = 0
            self._log.info("[%s] ... %d more lines, see %s", self._stage, count, self._path)


class _Lines:
    """Bytes into lines. Of a line redrawn with carriage returns only the last state is kept."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, chunk: bytes) -> Iterator[str]:
        """The lines that `chunk` completes; an empty chunk completes the last one."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE or (self._rest and not chunk):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            yield _last_state(line).decode("utf-8", "replace")
        if b"\r" in self._rest:  # a progress bar never ends its line: do not collect its states
            self._rest = _last_state(self._rest) + b"\r"


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class _Budget:
    """A token bucket: a burst passes whole, a flood is thinned out and counted."""

    def __init__(self) -> None:
        self._tokens, self._at = BURST_LINES, time.monotonic()
        self.suppressed = 0

    def take(self) -> bool:
        now = time.monotonic()
        self._tokens = min(BURST_LINES, self._tokens + (now - self._at) * LINES_PER_S)
        self._at = now
        if self._tokens < 1:
            self.suppressed += 1
            return False
        self._tokens -= 1
        return True


def secrets_of(env: Mapping[str, str]) -> list[str]:
    """Values of environment variables whose names say that they are secret, the longest first."""
    found = {
        value
        for name, value in env.items()
        if len(value) >= _SHORTEST_SECRET and _SECRET.search(name.upper())
    }
    return sorted(found, key=len, reverse=True)
