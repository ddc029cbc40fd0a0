"""Format the results of a benchmark: a table, a JSON line, and a part of `docs/benchmarks.md`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- what make bench-weights printed -->", "<!-- end -->"


@dataclass(frozen=True)
class Row:
    """One line of the table; `detail` goes into the JSON record."""

    what: str
    ours: str
    against: str
    ratio: str
    bar: str
    met: bool
    detail: Mapping[str, object]


@dataclass(frozen=True)
class Page:
    """A part of `docs/benchmarks.md` for the results of a benchmark.

    Attributes:
        begin: line before the table.
        taken: method of measurement, printed after date and machine; `{runs}` is filled in.
    """

    begin: str
    taken: str


WEIGHTS = Page(
    BEGIN,
    "medians of {runs} interleaved runs after one that warms the page cache, (fastest..slowest), "
    "and the median of peak memory.",
)
RL = Page(
    "<!-- what make bench-rl printed -->",
    "medians of {runs} interleaved runs (fastest..slowest).",
)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = ["| what | ours | against | ratio | must reach | met |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (row.what, row.ours, row.against, row.ratio, row.bar, "yes" if row.met else "no")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def document(rows: Sequence[Row], runs: int, *, bench: str = "weights") -> dict[str, Any]:
    """Return all results, with date and machine, as plain JSON."""
    return {
        "bench": bench,
        "date": time.strftime("%Y-%m-%d"),
        "runs": runs,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "load": [round(load, 1) for load in os.getloadavg()],
        "rows": [vars(row) for row in rows],
    }


def write_docs(
    folder: Path, rows: Sequence[Row], results: Mapping[str, Any], page: Page = WEIGHTS
) -> None:
    """Replace a table of `docs/benchmarks.md`.

    Args:
        folder: the folder `docs`.
        rows: rows of the table.
        results: the results, from `document`.
        page: the page.

    Raises:
        ValueError: the page lacks the lines around the table.
    """
    path = folder / "benchmarks.md"
    before, begin, rest = path.read_text().partition(page.begin)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: {page.begin!r} and {END!r} are to stand around the table")
    machine = f"{results['cores']} cores, {results['machine']}, {results['memory_gb']} GB"
    taken = f"{results['date']}, {machine}: {page.taken.format(runs=results['runs'])}"
    path.write_text(f"{before}{begin}\n{taken}\n\n{table(rows)}\n{end}{after}")
