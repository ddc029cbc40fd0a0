"""Run a command to its end, or keep one that answers requests; both stream output and events.

    launch([...], stage="train", log=log, log_path=logs / "train.log", on_event=on_step)

A failure raises `StageProcessError` with the last lines of output. When `launch` or a
`Conversation` ends, no process that it has started is alive; see `tasks/process/child.py`.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tasks.core.errors import PlumblineError, StageProcessError
from tasks.process.child import Child, python_child
from tasks.process.output import Log, Output

__all__ = ["Conversation", "OnEvent", "launch", "python_child"]

OnEvent = Callable[[dict[str, Any]], None]
"""Receiver of the events of a child process."""
GOODBYE_S = 3.0
"""Seconds that a process has to end after its input has."""


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
    """Run a command to its end and return its last lines of output.

    `log` gets the lines that the command wants its user to see, the file all of them. `on_event` is
    called in this thread with each event of `tasks/core/events.py`, in order; if it raises, the
    command is ended. Raises StageProcessError if the exit status is not zero ("exit"), or the
    command was too slow ("timeout").
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    with Output(stage=stage, log=log, log_path=log_path) as output:
        with Child(argv, env=env) as child:
            for event in _events(child, output, stage, lambda: deadline):
                if on_event is not None:
                    on_event(event)
        if (status := child.poll()) != 0:
            raise StageProcessError(stage, status, output.tail)
        return output.tail


def _events(
    child: Child, output: Output, stage: str, deadline: Callable[[], float]
) -> Iterator[dict[str, Any]]:
    """Yield events as they arrive, until the end of the output. Raises StageProcessError."""
    chunk: bytes | None = None
    while chunk != b"":
        if (chunk := child.read(deadline())) is None:
            raise StageProcessError(stage, child.end(), output.tail, "timeout")
        yield from output.feed(chunk)


class Conversation:
    """A child process that answers requests, so that its imports are paid for once.

    The child emits (`tasks.core.events.emit`) "ready" once. Then it reads requests from its
    standard input, one JSON object per line. For each it emits "reply" with any fields, or "error"
    with `message` and perhaps `details` (a list of lines) and `hint`. It ends with its input.

    Entering starts the process without waiting, so its imports overlap with other work; the first
    `ask` waits for "ready". Leaving ends the process with all descendants. `on_event` gets every
    other event; the other arguments are those of `launch`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stage: str,
        log: Log,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        on_event: OnEvent = lambda event: None,
    ) -> None:
        self._argv, self._env, self._stage = argv, env, stage
        self._log, self._log_path, self._on_event = log, log_path, on_event
        self._one_at_a_time = threading.Lock()
        self._closing = ExitStack()
        self._ready = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            output = Output(stage=self._stage, log=self._log, log_path=self._log_path)
            self._output = stack.enter_context(output)
            self._child = stack.enter_context(Child(self._argv, env=self._env, stdin=True))
            self._events = _events(self._child, self._output, self._stage, lambda: self._deadline)
            self._closing = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._closing:
            if error is None and self.is_running:
                self._child.stdin.close()
                self._deadline = time.monotonic() + GOODBYE_S
                with suppress(StageProcessError):  # a process that is too slow is ended
                    deque(self._events, maxlen=0)

    @property
    def is_running(self) -> bool:
        """True while the process has not ended."""
        return self._child.poll() is None

    def log_to(self, log: Log, log_path: Path) -> None:
        """Send the output of the next requests elsewhere, and forget the last lines so far."""
        with self._one_at_a_time:
            self._output.switch(log, log_path)

    def ask(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send one request of plain JSON, and return the fields of its "reply".

        A process that is too slow is ended, since a late answer could be taken for that of the next
        request. Raises PlumblineError if the process answered "error", and stays available;
        StageProcessError if it ended ("exit") or was too slow ("timeout").
        """
        with self._one_at_a_time:
            self._deadline = time.monotonic() + timeout_s
            if not self._ready:
                self._until("ready")
                self._ready = True
            try:
                self._child.stdin.write(json.dumps(request).encode() + b"\n")
                self._child.stdin.flush()
            except (BrokenPipeError, ValueError) as error:  # ValueError: the pipe is closed
                raise self._ended() from error
            return self._until("reply")

    def _until(self, kind: str) -> dict[str, Any]:
        for event in self._events:
            name = event.pop("event")
            if name == kind:
                return event
            if name == "error":
                raise PlumblineError(
                    f"{self._stage}: {event.get('message', 'failed without a message')}",
                    details=event.get("details", ()),
                    hint=event.get("hint", ""),
                )
            self._on_event({"event": name, **event})
        raise self._ended()

    def _ended(self) -> StageProcessError:
        return StageProcessError(self._stage, self._child.end(), self._output.tail)
