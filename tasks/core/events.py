"""Send events from a child process to its parent, as JSON lines in its ordinary output.

A child process calls `emit("step", step=3, loss=1.2)`. `tasks/process/launch.py` recognises the
line, passes the event to its caller and treats everything else as log text. One stream keeps both
in order, and no child process has to import MLflow.

The events of training steps are also kept in a file beside the checkpoints. A resumed run replays
those up to its checkpoint, so that its curves are whole.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import IO, Any

PREFIX = "@plumbline "
EVENTS = "events.jsonl"
"""File in the folder of a run's checkpoints."""
KEPT = ("step", "eval", "samples")
_kept: list[IO[str]] = []


def keep_in(folder: Path) -> None:
    """Keep the events of steps in a file of this folder, too, from now on in this process."""
    with contextlib.suppress(OSError):  # curves are not worth a run
        _kept.append((folder / EVENTS).open("a"))


def emit(event: str, /, **fields: Any) -> None:
    """Write one event to standard output; NaN and infinities are allowed."""
    # In one piece, since several ranks may write.
    sys.stdout.write(PREFIX + json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()
    if event not in KEPT or not _kept:
        return
    line = json.dumps({"event": event, **fields, "at": int(time.time() * 1000)})
    for file in _kept:
        with contextlib.suppress(OSError):
            print(line, file=file, flush=True)


def say(text: str) -> None:
    """Send a line for the log of the run; ordinary output only reaches the stage's log file."""
    emit("log", level="INFO", text=text)


class _Sent(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        emit("log", level=record.levelname, text=record.getMessage())


_sent = _Sent(logging.WARNING)


def send_warnings() -> None:
    """Send the warnings of this project's own loggers to the parent, from now on."""
    for name in ("tasks", "plumbline"):
        logging.getLogger(name).addHandler(_sent)


def rewind(folder: Path, step: int, source: Path | None = None) -> list[dict[str, Any]]:
    """Keep the events up to a step, and forget later ones: the run goes on from there.

    `source` is the folder of the checkpoints that the run is resumed from. Returns the events, each
    with the time `at` which it was emitted, in milliseconds.
    """
    before, events = (source or folder) / EVENTS, []
    if step and before.is_file():
        for line in before.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):  # half a line of a dead run
                event = json.loads(line)
                if event["event"] in KEPT and event["step"] <= step:
                    events.append(event)
    (folder / EVENTS).write_text("".join(json.dumps(event) + "\n" for event in events))
    return events


def parse(line: str) -> dict[str, Any] | None:
    """Return the event of a line; None for ordinary output."""
    at = line.find(PREFIX)
    if at < 0:
        return None
    try:
        event = json.loads(line[at + len(PREFIX) :])
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
