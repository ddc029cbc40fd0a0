"""Fill the template of `report.html` and write the page beside the summary.

    write_report(runs, "20261123-220458-629c4133", log)      # again, for a run of last week

The page loads nothing from a network and has no script.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from flows.orchestration.summary import harness_names, truncation_lines
from flows.report.collect import Collected, collect
from flows.report.figures import Figure, draw, histogram, row_lengths
from flows.report.results import (
    EXACT,
    OWN,
    PAIRS,
    REWARD,
    SAMPLED,
    Results,
    response_lengths,
    results,
)
from tasks.core.terminal import in_words
from tasks.serving.llama_cpp import serve_line

REPORT = "report.html"
_PERCENT = (EXACT, PAIRS, SAMPLED)


def write_report(runs: Path, run_id: str, log: Any) -> Path | None:
    """Write the report of a run and return its path.

    A failure to do so is one warning and never ends a run: None is returned.
    """
    path = runs / "reports" / run_id / REPORT
    try:
        path.write_text(page(collect(path.parent)), encoding="utf-8")
    except Exception as error:  # a full disk, a damaged file
        log.warning("no %s: %s: %s", path, type(error).__name__, error)
        return None
    return path


def page(run: Collected) -> str:
    """Return the report as HTML."""
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "duration": duration, "size": in_words}
    summary, by_row = run.summary, results(run)
    links = summary.get("pages", {}).items()
    return environment.get_template(f"{REPORT}.jinja").render(
        Markup=Markup,
        run=run,
        summary=summary,
        serve=_serve_lines(summary.get("served")),
        pages={name: url for name, url in links if url.startswith(("http://", "https://"))},
        steps=[(step, list(stages)) for step, stages in groupby(run.stages, lambda s: s.step)],
        measured=_measured(summary["eval"], by_row),
        plots=plots_of(run),
        truncated=[line for entry in summary["stages"] for line in truncation_lines(entry)],
        responses=responses_of(run, by_row),
        memory={k: v for k, v in summary.get("memory", {}).items() if "peak" in v},
    )


def number(value: float | None) -> str:
    """Return a number with as many digits as a reader needs; empty for None."""
    if value is None:
        return ""
    if value == 0 or (isinstance(value, int) and abs(value) < 1e6):
        return f"{value:g}"
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:.4g}"
    digits, _, power = f"{value:.1e}".partition("e")
    return f"{digits}e{int(power)}"


def duration(seconds: float | None) -> str:
    """Return a time in words: `7.4 s`, `3 min 05 s`, `2 h 04 min`."""
    if seconds is None:
        return ""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 100:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _serve_lines(served: str | None) -> str:
    if not served:
        return ""
    return f"{serve_line(Path(served))}\n{shlex.join(['plumbline', 'serve', served])}"


def _measured(
    values: Mapping[str, float | None], by_row: Mapping[str, Mapping[str, Results]]
) -> list[dict[str, Any]]:
    """Return the rows of the evaluation; `spread` is the 95 % interval of the change."""
    rate = PAIRS if "pairs" in values else EXACT
    last = [measures for stage, measures in by_row.items() if stage.endswith("smoke_eval")][-1:]
    rows = (
        (rate, "before", "after"),
        (OWN, "function_before", "function_after"),
        ("evaluation loss", "loss_before", "loss_after"),
        ("evaluation reward", "reward_before", "reward_after"),
        (SAMPLED, "drawn_before", "drawn_after"),
        (REWARD, "scored_before", "scored_after"),
        ("held-out loss, 16 bits to quantised", "quantized_loss_before", "quantized_loss_after"),
        (f"{rate}, 16 bits to quantised", "after", "quantized"),
        *((name, f"{name}_before", f"{name}_after") for name in harness_names(values)),
    )
    measured = []
    for name, first, second in rows:
        before, after = values.get(first), values.get(second)
        if before is None or after is None:
            continue
        is_share = name.partition(",")[0] in _PERCENT
        value, change = ("{:.1%}", "{:+.1f} points") if is_share else ("{:.4f}", "{:+.4f}")
        factor = 100 if is_share else 1
        rows_of = last[0].get(name) if last else None
        interval = rows_of.change() if rows_of else None
        ends = (interval.low, interval.high) if interval else ()
        spread = " to ".join(change.format(factor * end) for end in ends)
        measured.append({
            "name": name, "before": before, "after": after,
            "shown": [value.format(number) for number in (before, after)],
            "change": change.format(factor * (after - before)),
            "spread": spread.replace(" points to", " to"),
        })  # fmt: skip
    return measured


def plots_of(run: Collected) -> dict[str, list[Figure]]:
    """Return the pictures of each training stage: its curves, then the lengths of its rows."""
    plots = {stage: draw(stage, curves) for stage, curves in run.curves.items()}
    for stage, (bins, limit) in run.lengths.items():
        plots.setdefault(stage, []).append(row_lengths(stage, bins, limit))
    return {stage: figures for stage, figures in plots.items() if figures}


def responses_of(
    run: Collected, by_row: Mapping[str, Mapping[str, Results]]
) -> dict[str, tuple[list[Figure], int, int]]:
    """Return histograms, number of greedy responses, and of those cut, by smoke test."""
    responses = {}
    for stage in run.stages:
        name = stage.full_name
        before, after, cut = response_lengths(Path(stage.artifact))
        if name in by_row and after:
            figures = []
            if rewards := by_row[name].get(REWARD):
                values = list(rewards.before.values()), list(rewards.after.values())
                figures.append(histogram(name, "Reward of sampled responses", "reward", *values))
            figures.append(histogram(name, "Length of greedy responses", "tokens", before, after))
            responses[name] = figures, len(after), cut
    return responses
