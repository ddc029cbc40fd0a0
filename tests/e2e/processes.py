"""Living processes of a run."""

from __future__ import annotations

from pathlib import Path


def living(runs: Path) -> list[str]:
    """Return the command lines of living processes that name this folder of runs."""
    lines = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(runs) in text:
            lines.append(text)
    return lines
