"""Keep a child process that answers requests, so that its imports are paid for once.

The child process emits (`tasks.core.events.emit`) "ready" once. Then it reads requests from its
standard input, one JSON object per line. For each request it emits "reply" with any fields, or
"error" with `message` and perhaps `details` (a list of lines) and `hint`. It ends with its input.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tasks.core.errors import PlumblineError, StageProcessError
from tasks.process.child import Child
from tasks.process.output import Log, Output

GOODBYE_S = 3.0


class Conversation:
    """A child process that answers requests in JSON lines; a context manager.

    Entering starts the process without waiting, so its imports overlap with other work; the first
    `ask` waits for "ready". Leaving ends the process with all descendants. `on_event` gets every
    event except "ready", "reply" and "error"; the other arguments are those of `launch`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        stage: str,
        log: Log,
        log_path: Path,
        env: Mapping[str, str] | None = None,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> None:
        self._argv, self._env, self._stage = argv, env, stage
        self._log, self._log_path, self._on_event = log, log_path, on_event
        self._one_at_a_time = threading.Lock()
        self._closing = ExitStack()
        self._ready = False

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._output = stack.enter_context(
                Output(stage=self._stage, log=self._log, log_path=self._log_path)
            )
            self._child = stack.enter_context(Child(self._argv, env=self._env, stdin=True))
            self._events = self._read()
            self._closing = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._closing:
            if error is None and self._child.poll() is None:
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
                raise self._ended("exit") from error
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
        raise self._ended("exit")

    def _read(self) -> Iterator[dict[str, Any]]:
        """Yield events as they arrive, until the end of the output."""
        chunk: bytes | None = None
        while chunk != b"":
            chunk = self._child.read(self._deadline)
            if chunk is None:
                raise self._ended("timeout")
            yield from self._output.feed(chunk)

    def _ended(self, reason: str) -> StageProcessError:
        return StageProcessError(self._stage, self._child.end(), self._output.tail, reason)
