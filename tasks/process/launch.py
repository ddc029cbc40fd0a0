"""Run a command to its end, and stream its output and its events.

    launch([...], stage="train", log=log, log_path=logs / "train.log", on_event=on_step)

A failure raises `StageProcessError` with the last lines of output. When `launch` returns or raises,
no process that it has started is alive; see `tasks/process/child.py`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.errors import StageProcessError
from tasks.process.child import GRACE_S, Child, python_child
from tasks.process.json_worker import Conversation
from tasks.process.output import Log, Output

__all__ = ["Conversation", "launch", "python_child"]

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
    grace_s: float = GRACE_S,
) -> list[str]:
    """Run a command to its end and return its last lines of output.

    Args:
        argv: the command; `python_child` returns one for a module of this project.
        log: gets the lines that the command wants its user to see.
        log_path: file to which the whole output is appended.
        env: additions to the environment. The project's root is always importable.
        on_event: called in this thread with each event of `tasks/core/events.py`, in order. If it
            raises, the command is ended and the exception is passed on.
        grace_s: seconds from SIGTERM to SIGKILL when the command is ended.

    Raises:
        StageProcessError: the exit status is not zero ("exit"), or the command was too slow
            ("timeout").
    """
    deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
    with Output(stage=stage, log=log, log_path=log_path) as output:
        with Child(argv, env=env, grace_s=grace_s) as child:
            chunk: bytes | None = None
            while chunk != b"" and (chunk := child.read(deadline)) is not None:
                for event in output.feed(chunk):
                    if on_event is not None:
                        on_event(event)
        if chunk is None:
            raise StageProcessError(stage, child.poll(), output.tail, "timeout")
        if (status := child.poll()) != 0:
            raise StageProcessError(stage, status, output.tail)
        return output.tail
