"""Compare two runs: what was set differently, and which model is better.

    python flows/compare.py A B                        two runs of paths.runs by name, or by its end
    python flows/compare.py runs/reports/X latest      a run's folder, and the last run

Shows the settings that differ, drift of every hand-off, the evaluation with 95 % bootstrap
intervals, and final metrics. Reads files only. Exit status: 0 whether they differ or not, 2 a run
cannot be found or read, or the command line is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # flows/ would shadow libraries
    from flows.cli.start import start

    start("flows.cli.tool", "compare")

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.composed import Composed
from flows.report.collect import Collected, collect
from flows.report.compare import Comparison, compare
from flows.report.page import number
from flows.report.results import Interval
from flows.status import WIDTH
from tasks.core.finding import Finding, preflight
from tasks.core.terminal import plain

SUMMARY = "summary.json"


def job(composed: Composed, words: list[str]) -> int:
    """Run the command. Returns the exit status."""
    settings, problems = composed.settings, list[Finding]()
    runs = [_run(name, settings[name], composed.runs, problems) for name in ("a", "b")]
    preflight(problems)
    a, b = (run for run in runs if run is not None)
    _print([a.summary, b.summary], compare(a, b))
    return 0


def _run(key: str, name: str, runs: Path, problems: list[Finding]) -> Collected | None:
    """Return the contents of a run; None after adding a problem."""
    folders = sorted({folder.resolve() for folder in _folders(name, runs)})
    known = sorted(path.parent.name for path in runs.glob(f"reports/*/{SUMMARY}"))
    if len(folders) != 1:
        near = [folder.name for folder in folders] or difflib.get_close_matches(name, known, n=1)
        what = "several runs" if folders else f"no run that has ended, here or in {runs}/reports"
        hint = " or ".join(f"{key}={run}" for run in near[:3]) or f"{key}=<folder of a run>"
        problems.append(Finding(key, name, what, hint))
        return None
    try:
        return collect(folders[0])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"its {SUMMARY} cannot be read: {type(error).__name__}: {error}"
        problems.append(Finding(key, str(folders[0]), what, f"{key}=<another run>"))
        return None


def _folders(name: str, runs: Path) -> Iterator[Path]:
    """Yield the folders with a summary that a path or a name means."""
    for folder in (Path(name).expanduser(), runs / "reports" / name):
        if (folder / SUMMARY).is_file():
            yield folder
            return
    if name == "latest" and (runs / "latest" / SUMMARY).is_file():
        yield runs / "latest"
    elif "/" not in name and len(name) >= 4:  # `plumbline status` shows the end of a name
        for summary in runs.glob(f"reports/*/{SUMMARY}"):
            run = summary.parent.name
            if run.startswith(name) or run.rpartition("-")[2].startswith(name):
                yield summary.parent


def _print(summaries: Sequence[Mapping[str, Any]], comparison: Comparison) -> None:
    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for name, summary in zip("AB", summaries, strict=True):
        label = f"{name}  {summary['run']}  {summary['flow']} {summary['exp'] or ''}"
        console.print(Text(plain(f"{label.rstrip()}  {summary['status']}")))
    drifts = [(p.name, number(p.a), number(p.b)) for p in comparison.drift]
    evaluation = [
        (each.name, number(each.a), number(each.b), _change(each.interval), each.verdict)
        for each in comparison.evaluation
    ]
    metrics = [
        (p.name, number(p.a), number(p.b), "" if None in p else signed((p.b or 0) - (p.a or 0)))
        for p in comparison.metrics
    ]
    for title, titles, rows, empty in (
        ("configuration", ("key", "A", "B"), comparison.config, "the same"),
        ("drift of hand-offs", ("hand-off", "A", "B"), drifts, "none measured"),
        ("evaluation", ("evaluation", "A", "B", "B - A (95 %)", "result"), evaluation,
         "not comparable: no results per row"),
        ("final metrics", ("metric", "A", "B", "B - A"), metrics, "none"),
    ):  # fmt: skip
        console.print()
        console.print(Text(title if rows else f"{title}: {empty}", style="bold" if rows else ""))
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for name in titles:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*(Text(plain(cell)) for cell in row))
        if rows:
            console.print(table)


def _change(interval: Interval | None) -> str:
    if interval is None:
        return ""
    return f"{signed(interval.value)} [{signed(interval.low)}, {signed(interval.high)}]"


def signed(value: float) -> str:
    """Return a difference with its sign."""
    return f"{'+' if value > 0 else ''}{number(value)}"
