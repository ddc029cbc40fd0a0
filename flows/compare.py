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
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flows.cli.composed import Composed
from flows.report.collect import Collected, collect
from flows.report.figures import PLOTTED
from flows.report.page import number
from flows.report.results import (
    EXACT,
    OWN,
    PAIRS,
    REWARD,
    SAMPLED,
    Interval,
    Results,
    paired,
    results,
    unpaired,
)
from flows.status import WIDTH
from tasks.core.errors import Finding, preflight
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


class Pair(NamedTuple):
    """One number of both runs; None where a run does not have it."""

    name: str
    a: float | None
    b: float | None


class Evaluated(NamedTuple):
    """One measure of the evaluation of both served models; higher is better.

    `interval` is the difference, None if the runs are not comparable; `verdict` is in words.
    """

    name: str
    a: float | None
    b: float | None
    interval: Interval | None
    verdict: str


@dataclass(frozen=True)
class Comparison:
    """Differences of two runs; `config` has key, value in a, value in b where they differ."""

    config: list[tuple[str, str, str]]
    drift: list[Pair]
    evaluation: list[Evaluated]
    metrics: list[Pair]


def compare(a: Collected, b: Collected) -> Comparison:
    """Return the differences of two runs."""
    first, second = (flatten(_yaml(run.config)) for run in (a, b))
    keys = sorted({*first, *second} - {""})
    config = [(key, first.get(key, "(not set)"), second.get(key, "(not set)")) for key in keys]
    last = [
        Pair(f"{stage} {name}", *(of.get(name, [(0, None)])[-1][1] for of in curves))
        for stage, *curves in _matched(a.curves, b.curves)
        for name in dict.fromkeys([*curves[0], *curves[1]])
        if name in PLOTTED
    ]
    return Comparison(
        config=[row for row in config if row[1] != row[2]],
        drift=_pairs(*(_drifts(run) for run in (a, b))),
        evaluation=[
            row for matched in _matched(results(a), results(b)) for row in _evaluated(*matched)
        ],
        metrics=[*_pairs(*(_numbers(run) for run in (a, b))), *last],
    )


def flatten(value: Any, prefix: str = "") -> dict[str, str]:
    """Return the leaves of a configuration by dotted key, as JSON texts."""
    if isinstance(value, dict) and value:
        parts = [flatten(item, f"{prefix}{key}.") for key, item in value.items()]
        return {key: text for part in parts for key, text in part.items()}
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return {prefix.rstrip("."): text}


def _yaml(text: str) -> Any:
    with suppress(yaml.YAMLError):
        return yaml.safe_load(text) or {}
    return {}


def _numbers(run: Collected) -> dict[str, float | None]:
    scores = {f"eval/{name}": value for name, value in run.summary["eval"].items()}
    return {"seconds": run.summary["seconds"], **scores}


def _drifts(run: Collected) -> dict[str, float | None]:
    return {f"{s.full_name} {s.drift['measure']}": s.drift["value"] for s in run.stages if s.drift}


def _pairs(a: Mapping[str, float | None], b: Mapping[str, float | None]) -> list[Pair]:
    pairs = [Pair(name, a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])]
    return [pair for pair in pairs if (pair.a, pair.b) != (None, None)]


def _matched(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (name, of a, of b); without a common name, the last of each belong together."""
    if a and b and not set(a) & set(b):
        first, second = list(a)[-1], list(b)[-1]
        yield f"{first} / {second}", a[first], b[second]
        return
    for name in dict.fromkeys([*a, *b]):
        yield name, a.get(name, {}), b.get(name, {})


def _evaluated(
    stage: str, a: Mapping[str, Results], b: Mapping[str, Results]
) -> Iterator[Evaluated]:
    for measure in (EXACT, SAMPLED, OWN, REWARD, PAIRS):
        of_a, of_b = a.get(measure, Results()), b.get(measure, Results())
        first, second = list(of_a.after.values()), list(of_b.after.values())
        if not first and not second:
            continue
        means = [sum(values) / len(values) if values else None for values in (first, second)]
        interval, method = None, ""
        if not first or not second:
            verdict = f"not comparable: {'B' if first else 'A'} has no results per row"
        elif of_a.scale != of_b.scale:
            judges = "reward models" if measure == REWARD else "versions of eval.function"
            verdict = f"not comparable: two {judges} gave the numbers"
        elif of_a.after.keys() == of_b.after.keys():
            interval = paired(first, [of_b.after[key] for key in of_a.after])
            method = f"paired, {len(first)} rows"
        else:
            interval = unpaired(first, second)
            method = f"unpaired, {len(first)} and {len(second)} rows: they are not the same"
        if interval is not None:
            better = "B is better" if interval.value > 0 else "A is better"
            verdict = better if interval.is_significant else "no significant difference"
            verdict += f" ({method})"
        yield Evaluated(f"{stage}: {measure}", means[0], means[1], interval, verdict)
