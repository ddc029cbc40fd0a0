"""Run a command to its end, and stream its output and its events.

    launch([...], stage="train", log=log, log_path=logs / "train.log", on_event=on_step)

A failure raises `StageProcessError` with the last lines of output. When `launch` returns or raises,
no process that it has started is alive; see `tasks/process/child.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tasks.core.errors import StageProcessError
from tasks.process.child import GRACE_S, Child, kill_children_on_abort, live, python_child
from tasks.process.json_worker import Conversation
from tasks.process.output import CLOSING_S, Log, Output

__all__ = [
    "GRACE_S",
    "Conversation",
    "kill_children_on_abort",
    "launch",
    "python_child",
]

OnEvent = Callable[[dict[str, Any]], None]

PORT_TAKEN = ("Address already in use", "EADDRINUSE", "RendezvousConnectionError")
"""Words of a start that may succeed a moment later: a library chose a free port, and lost it."""


def launch(
    argv: Sequence[str],
    *,
    stage: str,
    log: Log,
    log_path: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    on_event: OnEvent | None = None,
    transient: Sequence[str] = (),
    grace_s: float = GRACE_S,
) -> list[str]:
    """Run a command to its end and return its last lines of output.

    Args:
        argv: the command; `python_child` returns one for a module of this project.
        stage: name for log lines and errors.
        log: gets the output line by line, at a limited rate.
        log_path: file to which the whole output is appended.
        env: additions to the environment. The project's root is always importable.
        timeout_s: seconds after which the command is ended; None for no limit.
        on_event: called in this thread with each event of `tasks/core/events.py`, in order. If it
            raises, the command is ended and the exception is passed on.
        transient: words such as `PORT_TAKEN`. A command that fails before its first event, and has
            one of them in its last lines, is started once more.
        grace_s: seconds from SIGTERM to SIGKILL when the command is ended.

    Raises:
        StageProcessError: the exit status is not zero ("exit"), the command was too slow
            ("timeout"), or `kill_children_on_abort` has ended it ("cancelled").
    """
    heard: list[str] = []

    def note(event: dict[str, Any]) -> None:
        heard.append(event["event"])
        if on_event is not None:
            on_event(event)

    run = partial(
        _run, argv, env, timeout_s, stage=stage, log=log, log_path=log_path, grace_s=grace_s
    )
    try:
        return run(note)
    except StageProcessError as error:
        if heard or not _is_transient(error, transient):
            raise
        log.warning("%s; trying once more", error.message)
    return run(on_event)


def _is_transient(error: StageProcessError, words: Sequence[str]) -> bool:
    tail = "\n".join(error.details)
    return error.reason == "exit" and any(word in tail for word in words)


def _run(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    timeout_s: float | None,
    on_event: OnEvent | None,
    *,
    stage: str,
    log: Log,
    log_path: Path,
    grace_s: float,
) -> list[str]:
    with Output(stage=stage, log=log, log_path=log_path) as output:
        with live(Child(argv, env=env, grace_s=grace_s)) as child:
            clock = _Clock(timeout_s)
            while chunk := _read(child, output, clock):
                _pass_on(output, chunk, on_event)
            if chunk is not None:
                _pass_on(output, b"", on_event)  # completes a last line without newline
        status = child.poll()
        too_slow = chunk is None and clock.ran_out
        reason = "timeout" if too_slow else "cancelled" if child.cancelled else "exit"
        if status != 0 or reason != "exit":
            raise StageProcessError(stage, status, output.tail, reason)
        return output.tail


def _read(child: Child, output: Output, clock: _Clock) -> bytes | None:
    """Return the next bytes of output; empty at its end, None when the time is over.

    If torchrun is ending its ranks, those that do not react get SIGKILL after `CLOSING_S`. Torchrun
    then has the same time again to name the rank that failed.
    """
    if output.closing:
        clock.at_most(CLOSING_S)
    chunk = child.read(clock.deadline)
    if chunk is None and output.closing and clock.once_more(CLOSING_S):
        child.kill(output.closing)
        chunk = child.read(clock.deadline)
    return chunk


def _pass_on(output: Output, chunk: bytes, on_event: OnEvent | None) -> None:
    for event in output.feed(chunk):
        if on_event is not None:
            on_event(event)


class _Clock:
    """Deadline of the caller, and an earlier one while torchrun is ending its ranks."""

    def __init__(self, timeout_s: float | None) -> None:
        self._callers = math.inf if timeout_s is None else time.monotonic() + timeout_s
        self._earlier = math.inf
        self._extended = False

    @property
    def deadline(self) -> float:
        return min(self._callers, self._earlier)

    def at_most(self, seconds: float) -> None:
        if self._earlier == math.inf:
            self._earlier = time.monotonic() + seconds

    def once_more(self, seconds: float) -> bool:
        """Move the earlier deadline once, within that of the caller. Returns False if refused."""
        if self._extended or time.monotonic() >= self._callers:
            return False
        self._earlier, self._extended = time.monotonic() + seconds, True
        return True

    @property
    def ran_out(self) -> bool:
        """True if the caller's deadline has passed, and not the earlier one."""
        return self._callers <= min(self._earlier, time.monotonic())
