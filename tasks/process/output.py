"""Split the output of a child process into log lines, events and last lines.

All lines go to a file, and a limited number per second to the logger at DEBUG: most are those of
libraries. The last lines stay in memory for the error message. `feed` returns the events
(`tasks/core/events.py`) in order, but for those that are lines of our own for the log. Values of
environment variables with a secret's name (TOKEN, PASSWORD, ...) are replaced by `***`, as in all
texts (`tasks/core/redaction.py`).
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.core import events
from tasks.core.disk import is_full, write_refused
from tasks.core.redaction import hide_environment
from tasks.core.terminal import plain
from tasks.process import torchrun_log

Log = logging.Logger | logging.LoggerAdapter[Any]

TAIL_LINES = 40
KEPT_LINES = 160
"""Lines in memory; more than the tail, because torchrun's epilogue is removed from them."""

TAIL_LINE_CHARACTERS = 2_000
LONGEST_LINE = 8 << 20
LINES_PER_S = 50.0
BURST_LINES = 200.0


class Output:
    """Output of one child process; a context manager that keeps the log file open.

    Args:
        stage: prefix of the lines in `log`.
        log: gets lines at DEBUG, at most about 50 per second, without torchrun's epilogue.
        log_path: file that gets every line except events.
    """

    def __init__(self, *, stage: str, log: Log, log_path: Path) -> None:
        self._stage = stage
        self._tail: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._lines = _Lines()
        self._budget = _Budget()
        hide_environment()
        self._open(log, log_path)

        self.closing: set[int] = set()
        """Process ids of the ranks that torchrun is ending because another rank failed."""
        self._epilogue = False

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._log_suppressed()
        self._file.close()

    def _open(self, log: Log, log_path: Path) -> None:
        self._log, self._path, self._is_full = log, log_path, False
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a buffer that a full disk refuses would raise again at the end.
        self._file = log_path.open("ab", buffering=0)

    def switch(self, log: Log, log_path: Path) -> None:
        """Send further lines elsewhere, and forget the last ones."""
        self.__exit__()
        self._tail.clear()
        self._open(log, log_path)

    @property
    def tail(self) -> list[str]:
        """Last lines, oldest first."""
        return torchrun_log.ranks_own(self._tail)[-TAIL_LINES:]

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Process a chunk of output (empty at the end) and yield its events."""
        for line in self._lines.split(chunk):
            event = events.parse(line)
            if event is None:
                self._text(line)
                continue
            before = line[: line.find(events.PREFIX)]  # text of another process in the same line
            if before.strip():
                self._text(before)
            if event["event"] == "log":
                self._say(event)
            else:
                yield event

    def _say(self, event: dict[str, Any]) -> None:
        """Log a line that the child wants its user to see."""
        line = plain(str(event.get("text", "")))
        self._write(line.encode("utf-8", "replace") + b"\n")
        self._tail.append(line[:TAIL_LINE_CHARACTERS])
        level = logging.getLevelNamesMapping().get(str(event.get("level")), logging.INFO)
        self._log.log(level, "[%s] %s", self._stage, line)

    def _text(self, line: str) -> None:
        line = plain(line)
        self._write(line.encode("utf-8", "replace") + b"\n")
        self._tail.append(line[:TAIL_LINE_CHARACTERS])
        if (pid := torchrun_log.closing_pid(line)) is not None:
            self.closing.add(pid)
        self._epilogue = self._epilogue or torchrun_log.is_verdict(line)
        if self._epilogue or not line.strip():
            return
        if self._budget.take():
            self._log_suppressed()
            self._log.debug("[%s] %s", self._stage, line)

    def _write(self, line: bytes) -> None:
        """Write a line. On a full disk the log ends; the child's own error is the one to report."""
        if self._is_full:
            return
        try:
            self._file.write(line)
        except OSError as error:
            if not is_full(error):
                raise
            self._is_full = True
            self._log.warning("[%s] %s", self._stage, write_refused(self._path, error).message)

    def _log_suppressed(self) -> None:
        count = self._budget.suppressed
        if count:
            self._budget.suppressed = 0
            self._log.debug("[%s] ... %d more lines, see %s", self._stage, count, self._path)


class _Lines:
    """Split bytes into lines. A line redrawn with carriage returns keeps its last state only."""

    def __init__(self) -> None:
        self._rest = b""

    def split(self, chunk: bytes) -> Iterator[str]:
        """Yield the lines that `chunk` completes; an empty chunk completes the last line."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE or (self._rest and not chunk):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            yield _last_state(line).decode("utf-8", "replace")
        if b"\r" in self._rest:  # a progress bar never ends its line: keep its last state only
            self._rest = _last_state(self._rest) + b"\r" * self._rest.endswith(b"\r")


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


class _Budget:
    """Rate limit of log lines (token bucket) that counts the suppressed ones."""

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
