"""The text that a command line prints at the end of a flow, and its exit status."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tasks.core.errors import PlumblineError


def exit_status(state: Any, runs: Path) -> int:
    """Print the summary, or what ended the flow.

    Args:
        state: Prefect's final state of the flow run.
        runs: `paths.runs`.

    Returns:
        0, the status of the error's kind, or 1 for an error that nobody raised on purpose.
    """
    if state.is_completed():
        return completed(runs)
    error = state.result(raise_on_failure=False)
    ours = isinstance(error, PlumblineError)
    text = error.report() if ours else f"{type(error).__name__}: {error}"
    logs = "" if ours and error.log else f"\n  logs: {runs / 'logs'}"
    print(f"\n{text}{logs}", file=sys.stderr)
    return error.exit_code if ours else 1


def completed(runs: Path) -> int:
    """Print the table of the run that has just ended well. Returns its exit status."""
    print((runs / "latest" / "summary.txt").read_text())
    return 0
