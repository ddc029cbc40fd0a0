"""Plot the metrics of training steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

Series = Mapping[str, Sequence[tuple[int, float]]]
"""(step, value) pairs by name."""
SHOWN = (
    "loss", "policy_loss", "value_loss", "reward", "reward_std", "kl", "entropy", "length",
    "truncated", "clip_high_frac", "explained_variance", "mismatch/mean_abs", "accuracy", "margin",
    "grad_norm", "lr", "tokens_per_s", "seconds/generate", "seconds/update",
)  # fmt: skip
COLUMNS = 3


def draw(series: Series, path: Path) -> bool:
    """Plot the series named in `SHOWN`, one small plot each, into one PNG file.

    Args:
        series: (step, value) pairs by name.
        path: path of the PNG file.

    Returns:
        True if a file was written; False if no series has at least two points.
    """
    chosen = [name for name in SHOWN if len(series.get(name, ())) > 1]
    if not chosen:
        return False
    from matplotlib.figure import Figure

    rows = -(-len(chosen) // COLUMNS)
    figure = Figure(figsize=(4 * COLUMNS, 2.6 * rows), layout="constrained")
    for number, name in enumerate(chosen, start=1):
        axes = figure.add_subplot(rows, COLUMNS, number)
        steps, values = zip(*series[name], strict=True)
        axes.plot(steps, values, linewidth=1.2)
        axes.set_title(name, fontsize=10)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90)
    return True
