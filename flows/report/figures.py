"""Draw curves of training and histograms as SVG, in colours that the page chooses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import accumulate
from statistics import median
from typing import Any

from flows.report.collect import Curves

INK, GRID, LINE, SECOND = "#010203", "#040506", "#070809", "#0a0b0c"
_COLOURS = {INK: "currentColor", GRID: "var(--grid)", LINE: "var(--line)", SECOND: "var(--second)"}
_UNUSED_ID = re.compile(
    r' id="(?:figure|axes|patch|matplotlib|text|line2d|xtick|ytick|legend)[^"]*"'
)

_BINS = 24


@dataclass(frozen=True)
class Plot:
    """One plot of the report.

    Attributes:
        validation: name of the curve of the validations; empty if there is none.
    """

    title: str
    unit: str
    metric: str
    validation: str = ""


PLOTS = (
    Plot("Loss", "loss", "loss", "eval/loss"),
    Plot("Reward", "mean reward", "reward", "eval/reward"),
    Plot("KL from the model before", "nats per token", "kl", "eval/kl"),
    Plot("Response length", "tokens", "length", "eval/length"),
    Plot("Train-inference mismatch", "mean |log-prob difference|", "mismatch/mean_abs"),
    Plot("Accuracy", "fraction of pairs", "accuracy", "eval/accuracy"),
    Plot("Truncated responses", "fraction", "truncated", "eval/truncated"),
    Plot("Learning rate", "learning rate", "lr"),
)
PLOTTED = {name for plot in PLOTS for name in (plot.metric, plot.validation) if name}
"""Names of the curves that have a plot."""


@dataclass(frozen=True)
class Drawn:
    """One plot with its points.

    Attributes:
        svg: the picture; empty without matplotlib.
    """

    plot: Plot
    points: Sequence[tuple[int, float]]
    validation: Sequence[tuple[int, float]]
    svg: str


def draw(stage: str, curves: Curves) -> list[Drawn]:
    """Return the plots of a training stage; without pictures if matplotlib is not installed."""
    drawn = []
    for plot in PLOTS:
        points, validation = curves.get(plot.metric, []), curves.get(plot.validation, [])
        if len(points) > 1 or len(validation) > 1:
            svg = _svg(plot, points, validation, f"{stage}/{plot.metric}")
            drawn.append(Drawn(plot, points, validation, svg))
    return drawn


@dataclass(frozen=True)
class Histogram:
    """Values before and after training.

    Attributes:
        before: values before training; may be empty.
    """

    stage: str
    title: str
    unit: str
    before: Sequence[float]
    after: Sequence[float]

    @property
    def svg(self) -> str:
        """Return the picture; empty without matplotlib."""
        return _picture(self.title, f"{self.stage}/{self.title}", self._draw)

    def _draw(self, axes: Any) -> None:
        values = [*self.before, *self.after]
        low, high = min(values), max(values)
        whole = all(value == int(value) for value in values) and high - low < _BINS
        count = int(high - low) + 1 if whole else _BINS
        edges = [low - 0.5, high + 0.5] if whole or low == high else [low, high]
        for numbers, colour, label, dashes in (
            (self.before, SECOND, "before", "--"),
            (self.after, LINE, "after", "-"),
        ):
            if numbers:
                axes.hist(
                    numbers, bins=count, range=edges, histtype="step", color=colour, label=label,
                    linewidth=1.5, linestyle=dashes,
                )  # fmt: skip
        axes.set_xlabel(self.unit)
        axes.set_ylabel("responses")
        if self.before:
            axes.legend()

    def rows(self) -> list[tuple[str, float, float, float]]:
        """Return (when, least, median, most): what is shown without matplotlib."""
        both = (("before", self.before), ("after", self.after))
        return [(when, min(v), median(v), max(v)) for when, v in both if v]


@dataclass(frozen=True)
class Lengths:
    """Lengths of the training rows, in tokens, before any is cut.

    Attributes:
        max_len: `train.max_len`.
    """

    stage: str
    bins: Sequence[tuple[int, int]]
    max_len: int

    title = "Length of training rows"
    unit = "tokens"

    @property
    def svg(self) -> str:
        """Return the picture; empty without matplotlib."""
        return _picture(self.title, f"{self.stage}/{self.title}", self._draw)

    def _draw(self, axes: Any) -> None:
        from matplotlib.ticker import FuncFormatter, NullFormatter

        ends = [end for end, _ in self.bins]
        starts = [max(1, ends[0] - 1), *ends[:-1]]
        widths = [end - start or 1 for start, end in zip(starts, ends, strict=True)]
        rows = [count for _, count in self.bins]
        axes.bar(starts, rows, widths, align="edge", color=LINE)
        limit = f"train.max_len={self.max_len}"
        axes.axvline(self.max_len, color=SECOND, linestyle="--", linewidth=1.5, label=limit)
        axes.set_axisbelow(True)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel(self.unit)
        axes.set_ylabel("rows")
        axes.legend()

    def rows(self) -> list[tuple[str, int]]:
        """Return (share of the rows, tokens that none of them exceeds)."""
        total, quantiles = sum(count for _, count in self.bins), []
        for share in (0.5, 0.9, 0.99, 1.0):
            sums = accumulate(count for _, count in self.bins)
            end = next(e for (e, _), s in zip(self.bins, sums, strict=True) if s >= share * total)
            quantiles.append((f"{share:.0%}", end))
        return quantiles


def _svg(plot: Plot, points: Any, validation: Any, salt: str) -> str:
    def lines(axes: Any) -> None:
        from matplotlib.ticker import MaxNLocator

        for pairs, colour, label, marker, dashes in (
            (points, LINE, "training", "." if len(points) <= 40 else "", "-"),
            (validation, SECOND, "validation", "o" if len(validation) <= 40 else "", "--"),
        ):
            if pairs:
                steps, values = zip(*pairs, strict=True)
                how: Any = {"color": colour, "label": label, "marker": marker, "linestyle": dashes}
                axes.plot(steps, values, linewidth=1.5, markersize=5, **how)
        axes.set_xlabel("optimizer step" if plot.metric in ("loss", "lr") else "step")
        axes.set_ylabel(plot.unit)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        if points and validation:
            axes.legend()
        if {value for _, value in [*points, *validation]} == {0.0}:
            axes.set_ylim(0, 1)  # matplotlib would centre it, and show fractions below zero

    return _picture(f"{plot.title} by step", salt, lines)


def _picture(label: str, salt: str, draw_on: Callable[[Any], None]) -> str:
    """Return one pair of axes as SVG; empty without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        return ""
    style = {
        "svg.hashsalt": salt, "svg.fonttype": "none", "font.size": 9, "text.color": INK,
        "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "axes.edgecolor": GRID,
        "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "grid.color": GRID,
        "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False,
    }  # fmt: skip
    with rc_context(style):  # type: ignore[arg-type]
        figure = Figure(figsize=(4.4, 2.7), layout="constrained")
        axes = figure.add_subplot()
        draw_on(axes)
        axes.grid(linewidth=0.6)
        file = StringIO()
        metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue()
    text = _UNUSED_ID.sub("", text[text.index("<svg") :])
    for colour, variable in _COLOURS.items():
        text = text.replace(colour, variable)
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)
