"""Living processes of a run."""

from __future__ import annotations

from pathlib import Path

import psutil


def living(runs: Path) -> list[str]:
    """Return the command lines of living processes that name this folder of runs."""
    processes = psutil.process_iter(["cmdline"])
    lines = (" ".join(process.info["cmdline"] or ()) for process in processes)
    return [line for line in lines if str(runs) in line]
