"""Structured lines that a child process says to its parent, within its ordinary output.

A child calls `emit("step", step=3, loss=1.2)`; `tasks/process/launch.py` recognises the line, hands
the event to its caller and keeps everything else as log text. One stream keeps both in order, and
no child has to import the tracker.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PREFIX = "@plumbline "


def emit(event: str, /, **fields: Any) -> None:
    """Say one event. Values must be plain JSON; NaN and infinities are allowed."""
    sys.stdout.write(PREFIX + json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


def parse(line: str) -> dict[str, Any] | None:
    """The event that a line carries, or None for ordinary output."""
    at = line.find(PREFIX)
    if at < 0:
        return None
    try:
        event = json.loads(line[at + len(PREFIX) :])
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
