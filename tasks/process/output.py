"""Split the output of a child process into log lines, events and last lines.

All lines go to a file, and a limited number per second to the logger at DEBUG: most are those of
libraries. The last lines stay in memory for the error message. `feed` returns the events
(`tasks/core/events.py`) in order, but for those that are lines of our own for the log. Values of
environment variables with a secret's name (TOKEN, PASSWORD, ...) are replaced by `***`, as in all
texts (`tasks/core/redaction.py`).

Of torchrun's output the ranks that it ends, and those that were killed, are read. If a rank fails,
torchrun sends SIGTERM to the others, waits up to 30 s for those that do not react, and then prints
an epilogue of forty lines about itself. The failed rank's own lines come before it.
"""

from __future__ import annotations

import collections
import logging
import re
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tasks.core import events
from tasks.core.disk import is_full, write_refused
from tasks.core.redaction import hide_environment
from tasks.core.terminal import plain

Log = logging.Logger | logging.LoggerAdapter[Any]

TAIL_LINES = 40
KEPT_LINES = 160
"""Lines in memory; more than the tail, because torchrun's epilogue is removed from them."""

TAIL_LINE_CHARACTERS = 2_000
LONGEST_LINE = 8 << 20
LINES_PER_S = 50.0
BURST_LINES = 200.0
CLOSING_S = 8.0
"""Seconds from torchrun's SIGTERM to the other ranks until `launch` sends them SIGKILL."""

_AGENT = r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] "
_CLOSING = re.compile(_AGENT + r"Sending process (\d+) closing signal")
_VERDICT = re.compile(_AGENT + r"failed \(exitcode: (-?\d+)\) local_rank: (\d+) \(pid: (\d+)\)")
_FAILED_RANK = re.compile(r"^ +rank +: (\d+) \(local_rank: \d+\)")
_FAILED_STATUS = re.compile(r"^ +exitcode +: (-?\d+) \(pid: (\d+)\)")


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
        return ranks_own(self._tail)[-TAIL_LINES:]

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
        if (pid := closing_pid(line)) is not None:
            self.closing.add(pid)
        self._epilogue = self._epilogue or is_verdict(line)
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


def closing_pid(line: str) -> int | None:
    """Return the process id of the rank that torchrun ends according to this line, or None."""
    match = _CLOSING.search(line)
    return int(match[1]) if match else None


def is_verdict(line: str) -> bool:
    """Return True if this line starts torchrun's epilogue."""
    return _VERDICT.search(line) is not None


def ranks_own(lines: Iterable[str]) -> list[str]:
    """Return the output without torchrun's epilogue, and a line for each rank that was killed.

    A killed rank could not write a message itself. Ranks that torchrun has ended because another
    one failed get no line. The order of failures is left out, too: a rank that loses its peer may
    end before torchrun looks, and is then the first on torchrun's list.
    """
    kept: list[str] = []
    closed: set[int] = set()
    killed: dict[int, str] = {}
    rank, epilogue = "?", False
    for line in lines:
        if (pid := closing_pid(line)) is not None:
            closed.add(pid)
        elif (verdict := _VERDICT.search(line)) is not None:
            epilogue = True
            _note(killed, closed, rank=verdict[2], pid=int(verdict[3]), status=int(verdict[1]))
        elif not epilogue:
            if not re.search(_AGENT + "Unable to shutdown process", line):
                kept.append(line)
        elif (named := _FAILED_RANK.search(line)) is not None:
            rank = named[1]
        elif (status := _FAILED_STATUS.search(line)) is not None:
            _note(killed, closed, rank=rank, pid=int(status[2]), status=int(status[1]))
    return kept + list(killed.values())


def _note(killed: dict[int, str], closed: set[int], *, rank: str, pid: int, status: int) -> None:
    if status < 0 and pid not in closed:
        killed[pid] = f"rank {rank} (pid {pid}) was killed by {_signal_name(-status)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
