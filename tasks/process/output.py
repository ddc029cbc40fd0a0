"""Split the output of a child process into log lines, events and last lines.

All lines go to a file; most are those of libraries. The last lines stay in memory for the error
message. `feed` returns the events (`tasks/core/events.py`) in order, but for those that are lines
of our own for the log. Secrets are removed, as from all texts (`tasks/core/redaction.py`).

If a rank fails, torchrun ends the others, and then prints an epilogue of forty lines about itself.
The failed rank's own lines come before it.
"""

from __future__ import annotations

import collections
import logging
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tasks.core import events
from tasks.core.redaction import hide_environment
from tasks.core.terminal import plain

Log = logging.Logger | logging.LoggerAdapter[Any]

TAIL_LINES = 40
KEPT_LINES = 160
"""Lines in memory; more than the tail, because torchrun's epilogue is removed from them."""
TAIL_LINE_CHARACTERS = 2_000
LONGEST_LINE = 8 << 20

_AGENT = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] (.*)")
_CLOSING = re.compile(r"Sending process (\d+) closing signal")
_RANK = re.compile(r"^ +rank +: (\d+) \(local_rank: \d+\)")
_KILLED = re.compile(r"^ +exitcode +: -(\d+) \(pid: (\d+)\)")


class Output:
    """Output of one child process; a context manager that keeps the log file open.

    `log` gets the lines that the child wants its user to see, the file every line except events.
    """

    def __init__(self, *, stage: str, log: Log, log_path: Path) -> None:
        self._stage = stage
        self._tail: collections.deque[str] = collections.deque(maxlen=KEPT_LINES)
        self._rest = b""
        self._file: Any = None
        hide_environment()
        self.switch(log, log_path)

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def switch(self, log: Log, log_path: Path) -> None:
        """Send further lines elsewhere, and forget the last ones."""
        if self._file is not None:
            self._file.close()
        self._tail.clear()
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a buffer that a full disk refuses would raise again at the end.
        self._log, self._file = log, log_path.open("ab", buffering=0)

    @property
    def tail(self) -> list[str]:
        """Last lines, oldest first."""
        return ranks_own(self._tail)[-TAIL_LINES:]

    def feed(self, chunk: bytes) -> Iterator[dict[str, Any]]:
        """Process a chunk of output (empty at the end) and yield its events."""
        for line in self.split(chunk):
            event = events.parse(line)
            if event is None:
                self._write(line)
                continue
            before = line[: line.find(events.PREFIX)]  # text of another process in the same line
            if before.strip():
                self._write(before)
            if event["event"] == "log":
                text = self._write(str(event.get("text", "")))
                level = logging.getLevelNamesMapping().get(str(event.get("level")), logging.INFO)
                self._log.log(level, "[%s] %s", self._stage, text)
            else:
                yield event

    def split(self, chunk: bytes) -> Iterator[str]:
        """Yield the lines that `chunk` completes; an empty chunk completes the last line.

        A line that is redrawn with carriage returns keeps its last state only.
        """
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > LONGEST_LINE or (self._rest and not chunk):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            yield _last_state(line).decode("utf-8", "replace")
        if b"\r" in self._rest:  # a progress bar never ends its line
            self._rest = _last_state(self._rest) + b"\r" * self._rest.endswith(b"\r")

    def _write(self, line: str) -> str:
        """Write a line to the file. Returns it as it was written."""
        line = plain(line)
        self._file.write(line.encode("utf-8", "replace") + b"\n")
        self._tail.append(line[:TAIL_LINE_CHARACTERS])
        return line


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def ranks_own(lines: Iterable[str]) -> list[str]:
    """Return the output without torchrun's epilogue, and a line for each rank that was killed.

    A killed rank could not write a message itself. Ranks that torchrun has ended because another
    one failed get no line. The order of failures is left out, too: a rank that loses its peer may
    end before torchrun looks, and is then the first on torchrun's list.
    """
    own: list[str] = []
    killed: list[str] = []
    closed: set[str] = set()
    rank, in_epilogue = "?", False
    for line in lines:
        if agent := _AGENT.search(line):
            if closing := _CLOSING.match(agent[1]):
                closed.add(closing[1])
            in_epilogue = in_epilogue or agent[1].startswith("failed (exitcode")
        elif not in_epilogue:
            own.append(line)
        elif named := _RANK.match(line):
            rank = named[1]
        elif (ended := _KILLED.match(line)) and ended[2] not in closed:
            name = signal.Signals(int(ended[1])).name
            killed.append(f"rank {rank} (pid {ended[2]}) was killed by {name}")
    return own + killed
