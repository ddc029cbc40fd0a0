"""Send events from a child process to its parent, as JSON lines in its ordinary output.

A child process calls `emit("step", step=3, loss=1.2)`. `tasks/process/launch.py` recognises the
line, passes the event to its caller and treats everything else as log text. One stream keeps both
in order, and no child process has to import MLflow.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PREFIX = "@plumbline "


def emit(event: str, /, **fields: Any) -> None:
    """Write one event to standard output.

    Args:
        event: name of the event.
        fields: plain JSON values; NaN and infinities are allowed.
    """
    sys.stdout.write(PREFIX + json.dumps({"event": event, **fields}) + "\n")
    sys.stdout.flush()


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
