"""Fill the template of `report.html` and write the page beside the summary.

    write_report(runs, "20261123-220458-629c4133", log)      # again, for a run of last week

The page loads nothing from a network. Its one script sorts and filters tables; a content security
policy with the script's hash keeps a browser from running any other.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from flows.orchestration.evaluation import harness_names
from flows.orchestration.summary import truncation_lines
from flows.report.collect import Collected, Stage, collect
from flows.report.figures import Histogram, Lengths, draw
from flows.report.results import (
    EXACT,
    OWN,
    PAIRS,
    REWARD,
    SAMPLED,
    Interval,
    Results,
    full_name,
    lengths,
    results,
)
from tasks.config.checks.memory import in_words
from tasks.serving.llama_cpp import serve_line

REPORT = "report.html"
TEMPLATE = "report.html.jinja"
SCRIPT = """
for (const box of document.querySelectorAll('input[data-filter]')) {
  box.addEventListener('input', () => {
    const words = box.value.toLowerCase();
    for (const row of document.querySelectorAll('#' + box.dataset.filter + ' tbody tr'))
      row.hidden = !row.textContent.toLowerCase().includes(words);
  });
}
for (const button of document.querySelectorAll('th button')) {
  button.addEventListener('click', () => {
    const head = button.parentElement, table = head.closest('table'), body = table.tBodies[0];
    const up = head.getAttribute('aria-sort') !== 'ascending';
    for (const each of head.parentElement.children) each.removeAttribute('aria-sort');
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending');
    const key = row => row.cells[head.cellIndex].dataset.value
      ?? row.cells[head.cellIndex].textContent.trim();
    const order = (a, b) => key(a).localeCompare(key(b), 'en', {numeric: true});
    [...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)).forEach(r => body.append(r));
  });
}
"""


@dataclass(frozen=True)
class Measured:
    """One row of the evaluation: a measure before and after training.

    Attributes:
        percent: True for a fraction, which is shown in percent.
        interval: the change with its 95 % interval; None if there are no results per row.
    """

    name: str
    before: float
    after: float
    percent: bool = False
    interval: Interval | None = None

    def shown(self, value: float) -> str:
        """Return a value as text."""
        return f"{value:.1%}" if self.percent else f"{value:.4f}"

    @property
    def change(self) -> str:
        """Difference between after and before, with its sign."""
        return self._difference(self.after - self.before)

    @property
    def spread(self) -> str:
        """The 95 % interval of the change; empty if it is not known."""
        if self.interval is None:
            return ""
        low, high = self._difference(self.interval.low), self._difference(self.interval.high)
        return f"{low.removesuffix(' points')} to {high}"

    def _difference(self, value: float) -> str:
        return f"{100 * value:+.1f} points" if self.percent else f"{value:+.4f}"


@dataclass(frozen=True)
class Responses:
    """Responses of one smoke test."""

    histograms: list[Histogram]
    count: int
    cut: int


def write_report(runs: Path, run_id: str, log: Any) -> Path | None:
    """Write the report of a run; a failure to do so is one warning and never ends a run.

    Returns:
        Path of the page; None if it could not be written.
    """
    path = runs / "reports" / run_id / REPORT
    try:
        path.write_text(page(collect(path.parent)), encoding="utf-8")
    except Exception as error:  # a full disk, a damaged file, a library that is not installed
        log.warning("no %s: %s: %s", path, type(error).__name__, error)
        return None
    return path


def page(collected: Collected) -> str:
    """Return the report as HTML."""
    summary = collected.summary
    plots = {stage: draw(stage, curves) for stage, curves in collected.curves.items()}
    return _render(
        TEMPLATE,
        run=collected,
        summary=summary,
        serve=_serve_lines(summary.get("served")),
        pages={name: url for name, url in summary.get("pages", {}).items() if _is_web(url)},
        steps=_steps(collected.stages),
        measured=_measured(summary["eval"], results(collected)),
        responses=responses_of(collected),
        memory={k: v for k, v in summary.get("memory", {}).items() if "peak" in v},
        plots={stage: drawn for stage, drawn in plots.items() if drawn},
        row_lengths={stage: Lengths(stage, *each) for stage, each in collected.lengths.items()},
        has_pictures=all(plot.svg for drawn in plots.values() for plot in drawn),
        truncated=[line for entry in summary["stages"] for line in truncation_lines(entry)],
        timeline=_timeline(collected.stages),
        failed_checks=sum(not check["ok"] for check in collected.checks),
    )


def _render(template: str, **values: Any) -> str:
    from jinja2 import Environment, FileSystemLoader
    from markupsafe import Markup

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"number": number, "duration": duration, "size": in_words}
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return environment.get_template(template).render(
        **values, Markup=Markup, script=Markup(SCRIPT), script_hash=f"'sha256-{digest}'"
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
    """Return what to type to serve a folder; empty if there is none."""
    if not served:
        return ""
    return f"{serve_line(Path(served))}\n{shlex.join(['plumbline', 'serve', served])}"


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _steps(stages: list[Stage]) -> list[tuple[str, list[Stage]]]:
    """Return the stages by the step that they belong to, in order."""
    return [(step, list(each)) for step, each in groupby(stages, key=lambda stage: stage.step)]


def _measured(
    values: Mapping[str, float | None], by_row: Mapping[str, Mapping[str, Results]]
) -> list[Measured]:
    rate = PAIRS if "pairs" in values else EXACT
    last = [measures for stage, measures in by_row.items() if stage.endswith("smoke_eval")][-1:]
    rows = (
        (rate, "before", "after", True),
        (OWN, "function_before", "function_after", False),
        ("evaluation loss", "loss_before", "loss_after", False),
        ("evaluation reward", "reward_before", "reward_after", False),
        (SAMPLED, "drawn_before", "drawn_after", True),
        (REWARD, "scored_before", "scored_after", False),
        ("held-out loss, 16 bits to quantised", "quantized_loss_before", "quantized_loss_after",
         False),
        (f"{rate}, 16 bits to quantised", "after", "quantized", True),
        *((name, f"{name}_before", f"{name}_after", False) for name in harness_names(values)),
    )  # fmt: skip
    measured = []
    for name, first, second, percent in rows:
        before, after = values.get(first), values.get(second)
        if before is not None and after is not None:
            rows_of = last[0].get(name) if last else None
            change = rows_of.change() if rows_of else None
            measured.append(Measured(name, before, after, percent, change))
    return measured


def responses_of(run: Collected) -> dict[str, Responses]:
    """Return the responses of each smoke test of a language model, by the stage's name."""
    by_row, responses = results(run), {}
    for stage in run.stages:
        name = full_name(stage)
        before, after, cut = lengths(Path(stage.artifact))
        if name in by_row and after:
            drawn = [Histogram(name, "Length of greedy responses", "tokens", before, after)]
            if rewards := by_row[name].get(REWARD):
                values = list(rewards.before.values()), list(rewards.after.values())
                drawn.insert(0, Histogram(name, "Reward of sampled responses", "reward", *values))
            responses[name] = Responses(drawn, len(after), cut)
    return responses


def _timeline(stages: list[Stage]) -> list[tuple[Stage, float, float]]:
    """Return (stage, start, width) in percent of the run; empty if no times are recorded."""
    timed = [s for s in stages if s.started is not None and s.seconds is not None]
    total = max(((s.started or 0) + (s.seconds or 0) for s in timed), default=0.0)
    if not total:
        return []
    scale = 100 / total
    return [
        (s, round(scale * (s.started or 0), 2), round(max(scale * (s.seconds or 0), 0.3), 2))
        for s in timed
    ]
