"""Draw curves of training and histograms as SVG, in colours that the page chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import Any

from flows.report.collect import Curves

_INK, _GRID, _LINE, _SECOND = "#010203", "#040506", "#070809", "#0a0b0c"
_VARIABLES = {
    _INK: "currentColor", _GRID: "var(--grid)", _LINE: "var(--line)", _SECOND: "var(--second)",
}  # fmt: skip
_BINS = 24
_FEW = 40
"""Most points of a curve that are marked."""

_PLOTS = (
    # title, unit, metric; its validations are under `eval/`
    ("Loss", "loss", "loss"),
    ("Reward", "mean reward", "reward"),
    ("KL from the model before", "nats per token", "kl"),
    ("Response length", "tokens", "length"),
    ("Train-inference mismatch", "mean |log-prob difference|", "mismatch/mean_abs"),
    ("Accuracy", "fraction of pairs", "accuracy"),
    ("Truncated responses", "fraction", "truncated"),
    ("Learning rate", "learning rate", "lr"),
)
PLOTTED = {name for *_, metric in _PLOTS for name in (metric, f"eval/{metric}")}
"""Names of the curves that have a plot."""


@dataclass(frozen=True)
class Figure:
    """A titled picture."""

    title: str
    svg: str


def draw(stage: str, curves: Curves) -> list[Figure]:
    """Return the plots of a training stage; a single point is no curve."""
    figures = []
    for title, unit, metric in _PLOTS:
        points, validation = curves.get(metric, []), curves.get(f"eval/{metric}", [])
        if max(len(points), len(validation)) > 1:
            x_label = "optimizer step" if metric in ("loss", "lr") else "step"
            label, salt = f"{title} by step", f"{stage}/{metric}"
            svg = _picture(label, salt, _curves, points, validation, x_label, unit)
            figures.append(Figure(title, svg))
    return figures


def _curves(axes: Any, points: Any, validation: Any, x_label: str, y_label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    for pairs, colour, label, marker, style in (
        (points, _LINE, "training", ".", "-"), (validation, _SECOND, "validation", "o", "--"),
    ):  # fmt: skip
        if pairs:
            steps, values = zip(*pairs, strict=True)
            axes.plot(
                steps, values, color=colour, label=label, linestyle=style, linewidth=1.5,
                marker=marker if len(pairs) <= _FEW else "", markersize=5,
            )  # fmt: skip
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if points and validation:
        axes.legend()
    if not any(value for _, value in [*points, *validation]):
        axes.set_ylim(0, 1)  # matplotlib would centre it, and show fractions below zero


def histogram(
    stage: str, title: str, unit: str, before: Sequence[float], after: Sequence[float]
) -> Figure:
    """Return the histogram of values before and after training; `before` may be empty."""
    return Figure(title, _picture(title, f"{stage}/{title}", _bars, unit, before, after))


def _bars(axes: Any, unit: str, before: Sequence[float], after: Sequence[float]) -> None:
    values = [*before, *after]
    low, high = min(values), max(values)
    are_counts = all(value == int(value) for value in values) and high - low < _BINS
    bins = int(high - low) + 1 if are_counts else _BINS
    edges = (low - 0.5, high + 0.5) if are_counts or low == high else (low, high)
    for numbers, colour, label, style in (
        (before, _SECOND, "before", "--"), (after, _LINE, "after", "-"),
    ):  # fmt: skip
        if numbers:
            axes.hist(
                numbers, bins=bins, range=edges, histtype="step", color=colour, label=label,
                linewidth=1.5, linestyle=style,
            )  # fmt: skip
    axes.set_xlabel(unit)
    axes.set_ylabel("responses")
    if before:
        axes.legend()


def row_lengths(stage: str, bins: Sequence[tuple[int, int]], max_len: int) -> Figure:
    """Return the lengths of the training rows, as (largest length, rows), with `train.max_len`."""
    title = "Length of training rows"
    return Figure(title, _picture(title, f"{stage}/{title}", _lengths, bins, max_len))


def _lengths(axes: Any, bins: Sequence[tuple[int, int]], max_len: int) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    ends = [end for end, _ in bins]
    starts = [max(1, ends[0] - 1), *ends[:-1]]
    widths = [end - start or 1 for start, end in zip(starts, ends, strict=True)]
    axes.bar(starts, [rows for _, rows in bins], widths, align="edge", color=_LINE)
    limit = f"train.max_len={max_len}"
    axes.axvline(max_len, color=_SECOND, linestyle="--", linewidth=1.5, label=limit)
    axes.set_axisbelow(True)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens")
    axes.set_ylabel("rows")
    axes.legend()


def _picture(label: str, salt: str, draw_on: Callable[..., None], *arguments: Any) -> str:
    """Return one pair of axes as SVG."""
    from matplotlib import figure, rc_context

    style: dict[Any, Any] = {
        "svg.hashsalt": salt, "svg.fonttype": "none", "font.size": 9, "text.color": _INK,
        "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "axes.edgecolor": _GRID,
        "axes.labelcolor": _INK, "xtick.color": _INK, "ytick.color": _INK, "grid.color": _GRID,
        "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with rc_context(style):
        drawn = figure.Figure(figsize=(4.4, 2.7), layout="constrained")
        axes = drawn.add_subplot()
        draw_on(axes, *arguments)
        axes.grid(linewidth=0.6)
        file = StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        drawn.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
