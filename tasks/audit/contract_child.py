"""Answer one request of `tasks.weights.execute.worker` with one JSON line, as a process."""

from __future__ import annotations

import json
import sys
from typing import Any

from tasks.core.errors import PlumblineError
from tasks.weights.execute.worker import perform


def main() -> None:
    """Answer the request on standard input."""
    reply: dict[str, Any]
    try:
        reply = {"facts": perform(json.load(sys.stdin))}
    except PlumblineError as error:
        reply = {"error": error.message}
    print("\n" + json.dumps(reply))  # whatever a library printed before it


if __name__ == "__main__":
    main()
