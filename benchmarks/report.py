"""The table of a run, its JSON line, and both in `docs/`: benchmarks.md, .json and .svg."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plot import draw
from benchmarks.rounds import Row

BEGIN, END = "<!-- what make bench-weights printed -->", "<!-- end -->"


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| what | ours | against | ratio | must reach | met |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (row.what, row.ours, row.against, row.ratio, row.bar, "yes" if row.met else "no")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def document(rows: Sequence[Row], runs: int) -> dict[str, Any]:
    """Everything that was measured, as plain JSON."""
    return {
        "bench": "weights",
        "date": time.strftime("%Y-%m-%d"),
        "runs": runs,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "load": [round(load, 1) for load in os.getloadavg()],
        "rows": [vars(row) for row in rows],
    }


def write_docs(folder: Path, rows: Sequence[Row], found: Mapping[str, Any]) -> None:
    """Put a run into the documents: only the table of benchmarks.md is replaced.

    Raises:
        ValueError: benchmarks.md has no place for it.
    """
    path = folder / "benchmarks.md"
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: {BEGIN!r} and {END!r} are to stand around the table")
    taken = (
        f"{found['date']}, {found['cores']} cores, {found['machine']}, {found['memory_gb']} GB: "
        f"medians of {found['runs']} interleaved runs after one that warms the page cache, "
        "(fastest..slowest), and the median of peak memory."
    )
    path.write_text(f"{before}{begin}\n{taken}\n\n{table(rows)}\n{end}{after}")
    (folder / "benchmarks.json").write_text(json.dumps(found) + "\n")
    (folder / "benchmarks.svg").write_text(draw(found["rows"]))
