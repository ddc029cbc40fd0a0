"""Draw the plot of `docs/benchmarks.md` from the JSON line that `make bench-weights` prints.

    python -m benchmarks.plot RESULT.json docs/benchmarks.svg

Each comparison is a group with its own scale. A bar is the median wall time; the line in it goes
from the fastest to the slowest run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT = 760, 190, 170
BAR, GAP, HEAD = 18, 8, 34
OURS, PEERS = "#2b6cb0", "#a0aec0"
STYLE = "font-family:sans-serif;font-size:12px"


def draw(rows: list[Mapping[str, Any]]) -> str:
    """Return an SVG with one group for each row with several contenders."""
    parts, top = [], 10
    for row in rows:
        series = {name: runs for name, runs in row["detail"].items() if isinstance(runs, dict)}
        if len(series) < 2 or not all("runs_s" in runs for runs in series.values()):
            continue
        title = row["what"].removesuffix(", time").removesuffix(" vs peft").rstrip(",")
        parts.append(f'<text x="10" y="{top + 18}" font-weight="bold">{escape(title)}</text>')
        parts += _group(series, top + HEAD)
        top += HEAD + len(series) * (BAR + GAP) + 10
    body = "\n".join(parts)
    size = f'width="{WIDTH}" height="{top}" viewBox="0 0 {WIDTH} {top}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="{STYLE}">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _group(series: Mapping[str, Mapping[str, Any]], top: int) -> Iterator[str]:
    scale = (WIDTH - LEFT - RIGHT) / max(max(runs["runs_s"]) for runs in series.values())
    for index, (name, runs) in enumerate(series.items()):
        y, middle = top + index * (BAR + GAP), top + index * (BAR + GAP) + BAR / 2
        length = max(1.0, runs["seconds"] * scale)
        colour = OURS if name == "ours" else PEERS
        low, high = (LEFT + edge(runs["runs_s"]) * scale for edge in (min, max))
        label = f"{runs['seconds']:.2f} s, {runs['peak_mb']:.0f} MB"
        yield f'<text x="{LEFT - 8}" y="{middle + 4}" text-anchor="end">{escape(name)}</text>'
        yield f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>'
        yield f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="#1a202c" stroke-width="1.5"/>'
        yield f'<text x="{max(high, LEFT + length) + 6:.1f}" y="{middle + 4}">{label}</text>'


def main() -> None:
    """Read the JSON line, and write the SVG."""
    source, target = map(Path, sys.argv[1:3])
    last = source.read_text().strip().splitlines()[-1]
    target.write_text(draw(json.loads(last)["rows"]))


if __name__ == "__main__":
    main()
