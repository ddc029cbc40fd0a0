"""Rounds of a benchmark: contenders take turns, each in its own process and a fresh folder."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.children import Cost, Series, run


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


Commands = Mapping[str, Callable[[Path], list[str]]]
"""Functions that return a command line, by contender; the argument is the folder to write."""


@dataclass(frozen=True)
class Bench:
    """Settings of the benchmark: folder of the models, number of rounds, sizes of models in B."""

    root: Path
    runs: int
    sizes: Sequence[str]

    @property
    def middle(self) -> str:
        """Size for comparisons with other tools: 1.5 B if it is among the sizes."""
        return "1.5" if "1.5" in self.sizes else self.sizes[0]

    def model(self, size: str) -> tuple[Path, Path]:
        """Return the folders of a base and its adapter; made at the first call."""
        base, adapter = self.root / f"base-{size}", self.root / f"adapter-{size}"
        if not base.exists():
            made("base", base, size)
            made("adapter", adapter, size)
        return base, adapter

    def interleaved(self, commands: Commands) -> dict[str, Series]:
        """Run every command once per round, each into a fresh folder that is removed afterwards."""
        costs: dict[str, list[Cost]] = {name: [] for name in commands}
        for number in range(self.runs + 1):
            for name, command in commands.items():
                out = self.root / "out"
                os.sync()  # or the next contender would wait for the last one's data
                cost = run(command(out))
                shutil.rmtree(out, ignore_errors=True)
                if number:  # the first round warms the page cache
                    costs[name].append(cost)
        return {name: Series(tuple(runs)) for name, runs in costs.items()}


def made(kind: str, folder: Path, *arguments: str) -> None:
    """Make a model or adapter in a child, because children inherit their parent's peak memory."""
    run([sys.executable, "-m", "benchmarks.synthetic", kind, str(folder), *arguments])


def ratio_row(what: str, ours: Series, peer: Series, bar: float, detail: dict[str, object]) -> Row:
    """Return the row for our wall time divided by another tool's, which must not exceed `bar`."""
    ratio = ours.seconds / peer.seconds
    return Row(what, str(ours), str(peer), f"{ratio:.2f}", f"<= {bar:g}", ratio <= bar, detail)
