"""Child process of `class_contract`: perform one request, print the reply as one JSON line."""

from __future__ import annotations

import json
import sys
from typing import Any

from tasks.core.errors import PlumblineError
from tasks.weights.execute.worker import perform


def main() -> None:
    """Read the request from standard input and print the reply."""
    reply: dict[str, Any]
    try:
        reply = {"facts": perform(json.load(sys.stdin))}
    except PlumblineError as error:
        reply = {"error": error.message}
    print("\n" + json.dumps(reply))  # on a line of its own, after any output of libraries


if __name__ == "__main__":
    main()
