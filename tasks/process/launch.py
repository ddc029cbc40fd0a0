"""Child processes as stages need them: run to the end, or kept for a conversation.

    launch([...], stage="train", log=log, log_path=logs / "train.log", on_event=on_step)

streams the child's output, hands its events on, and raises `StageProcessError` with its last lines
when it fails. When `launch` returns or raises, by whatever exception, nothing of the child is
running any more. See `tasks/process/child.py` for how.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.errors import StageProcessError
from tasks.process.child import Child, kill_children_on_abort, live, python_child
from tasks.process.json_worker import Conversation
from tasks.process.output import Log, Output
from tasks.process.torchrun_log import CLOSING_S

__all__ = ["Conversation", "kill_children_on_abort", "launch", "python_child"]

OnEvent = Callable[[dict[str, Any]], None]


def launch(
    argv: Sequence[str],
    *,
    stage: str,
    log: Log,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    on_event: OnEvent | None = None,
) -> list[str]:
    """Run a command to its end and return the last lines it said.

    Args:
        argv: the command; `python_child` makes one for a module of ours.
        stage: name for log lines and errors.
        log: gets the output line by line, thinned out when there is a flood.
        log_path: file the whole output is appended to.
        env: additions to the environment. The project's root is importable in any case.
        timeout_s: the command is ended when it takes longer.
        on_event: called in this thread with each event of `tasks/core/events.py`, in order. If it
            raises, the command is ended and the exception goes on.

    Raises:
        StageProcessError: status other than zero ("exit"), too slow ("timeout"), or ended by
            `kill_children_on_abort` ("cancelled").
    """
    with Output(stage=stage, log=log, log_path=log_path) as output:
        with live(Child(argv, env=env)) as child:
            clock = _Clock(timeout_s)
            while chunk := _read(child, output, clock):
                _hand_on(output, chunk, on_event)
            if chunk is not None:
                _hand_on(output, b"", on_event)  # completes a last line without an end
        status = child.poll()
        too_slow = chunk is None and clock.ran_out
        reason = "timeout" if too_slow else "cancelled" if child.cancelled else "exit"
        if status != 0 or reason != "exit":
            raise StageProcessError(stage, status, output.tail, reason)
        return output.tail


def _read(child: Child, output: Output, clock: _Clock) -> bytes | None:
    """The next bytes of output; empty at its end, None when the time is over.

    Ranks that do not react while torchrun ends them get SIGKILL after `CLOSING_S`, and torchrun as
    long again to name the rank that failed.
    """
    if output.closing:
        clock.at_most(CLOSING_S)
    chunk = child.read(clock.deadline)
    if chunk is None and output.closing and clock.once_more(CLOSING_S):
        child.kill(output.closing)
        chunk = child.read(clock.deadline)
    return chunk


def _hand_on(output: Output, chunk: bytes, on_event: OnEvent | None) -> None:
    for event in output.feed(chunk):
        if on_event is not None:
            on_event(event)


class _Clock:
    """The deadline a caller gave, and the nearer one once torchrun is ending its ranks."""

    def __init__(self, timeout_s: float | None) -> None:
        self._given = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._nearer = math.inf
        self._extended = False

    @property
    def deadline(self) -> float:
        return min(self._given, self._nearer)

    def at_most(self, seconds: float) -> None:
        if self._nearer == math.inf:
            self._nearer = time.monotonic() + seconds

    def once_more(self, seconds: float) -> bool:
        """Move the nearer deadline, within the given one; return False the second time."""
        if self._extended or time.monotonic() >= self._given:
            return False
        self._nearer, self._extended = time.monotonic() + seconds, True
        return True

    @property
    def ran_out(self) -> bool:
        """True if the caller's deadline has passed before anything else happened."""
        return self._given <= min(self._nearer, time.monotonic())
