"""Rounds: whatever is compared takes turns, each in a process of its own and a fresh folder."""

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
    """One line of the table."""

    what: str
    ours: str
    against: str
    ratio: str
    bar: str
    met: bool
    detail: Mapping[str, object]


Commands = Mapping[str, Callable[[Path], list[str]]]
"""Command lines by contender; each is told the folder that it may write."""


@dataclass(frozen=True)
class Bench:
    """Where models lie, and how often things are run."""

    root: Path
    runs: int
    sizes: Sequence[str]

    @property
    def middle(self) -> str:
        """The size at which peers are compared: 1.5 B where that is asked for."""
        return "1.5" if "1.5" in self.sizes else self.sizes[0]

    def model(self, size: str) -> tuple[Path, Path]:
        """A base and its adapter; made when first asked for."""
        base, adapter = self.root / f"base-{size}", self.root / f"adapter-{size}"
        if not base.exists():
            made("base", base, size)
            made("adapter", adapter, size)
        return base, adapter

    def interleaved(self, commands: Commands) -> dict[str, Series]:
        """Every command once a round, each into a fresh folder that is removed at once."""
        costs: dict[str, list[Cost]] = {name: [] for name in commands}
        for number in range(self.runs + 1):
            for name, command in commands.items():
                out = self.root / "out"
                os.sync()  # nobody pays for what another one left to be written
                cost = run(command(out))
                shutil.rmtree(out, ignore_errors=True)
                if number:  # the first round warms the page cache for everyone
                    costs[name].append(cost)
        return {name: Series(tuple(found)) for name, found in costs.items()}


def made(kind: str, folder: Path, *arguments: str) -> None:
    """Have a child make something: a child starts with its parent's peak memory, so stay small."""
    run([sys.executable, "-m", "benchmarks.synthetic", kind, str(folder), *arguments])


def ratio_row(what: str, ours: Series, peer: Series, bar: float, detail: dict[str, object]) -> Row:
    """Wall time beside a peer's."""
    ratio = ours.seconds / peer.seconds
    return Row(what, str(ours), str(peer), f"{ratio:.2f}", f"<= {bar:g}", ratio <= bar, detail)
