"""Rounds of `make bench-rl`: contenders that time themselves, and the models that they need."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.children import Cost, run
from benchmarks.rl_setting import SIZES

QUESTION_WORDS = 32
"""Of a prompt in the row about iterations."""


@dataclass(frozen=True)
class Timed:
    """One contender over all rounds."""

    costs: tuple[Cost, ...]

    @cached_property
    def told(self) -> list[dict[str, Any]]:
        """What each round reported."""
        return [heard(cost) for cost in self.costs]

    @property
    def runs(self) -> list[float]:
        """Seconds of each round: the median of what was timed in it."""
        return [median(one["seconds"]) for one in self.told]

    @property
    def seconds(self) -> float:
        """Their median."""
        return median(self.runs)

    @property
    def peak_mb(self) -> float:
        """Median peak memory of the process, or of its largest child."""
        return median(cost.peak_mb for cost in self.costs)

    @property
    def text(self) -> str:
        """For a cell of the table."""
        return f"{self.seconds:.3g} s ({min(self.runs):.3g}..{max(self.runs):.3g})"

    @property
    def rate(self) -> str:
        """The same as tokens a second."""
        rates = [one["tokens"] / s for one, s in zip(self.told, self.runs, strict=True)]
        return f"{median(rates):.0f} tokens/s ({min(rates):.0f}..{max(rates):.0f})"

    def as_json(self) -> dict[str, object]:
        """Plain JSON: what is plotted, what whole processes cost, and what they reported."""
        return {
            "seconds": round(self.seconds, 4),
            "runs_s": [round(one, 4) for one in self.runs],
            "cpu_s": [round(cost.cpu_seconds, 1) for cost in self.costs],
            "peak_mb": round(self.peak_mb, 1),
            "told": self.told,
        }


def heard(cost: Cost) -> dict[str, Any]:
    """The last line of a contender that is its report.

    Raises:
        RuntimeError: there is none.
    """
    lines = [line for line in cost.said.splitlines() if line.startswith('{"bench"')]
    if not lines:
        raise RuntimeError(f"a contender ended without a report:\n{cost.said[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])["bench"]
    return found


Commands = Mapping[str, Callable[[Path], list[str]]]
"""Command lines by contender; each is told a folder that is not there yet."""


@dataclass(frozen=True)
class Bench:
    """Where things lie, how often they are run, and on which models."""

    root: Path
    runs: int
    size: str
    handed: str
    dtype: str

    def base(self, size: str) -> str:
        """A model; made when first asked for."""
        return self._made(f"base-{size}", "make_base", repr(size))

    def ending_base(self, size: str) -> str:
        """One whose replies end by themselves."""
        return self._made(f"ending-base-{size}", "make_ending_base", repr(size))

    def adapter(self, size: str) -> str:
        """Its adapter."""
        return self._made(f"adapter-{size}", "make_adapter", repr(self.base(size)))

    def prompts(self, size: str) -> str:
        """Prompts of its words."""
        words = f"vocabulary={SIZES[size].vocabulary}, count=64, length={QUESTION_WORDS}"
        return self._made(f"prompts-{size}", "make_prompts", words)

    def interleaved(self, commands: Commands) -> dict[str, Timed]:
        """Every contender once a round."""
        costs: dict[str, list[Cost]] = {name: [] for name in commands}
        for _ in range(self.runs):
            for name, command in commands.items():
                with tempfile.TemporaryDirectory(dir=self.root) as folder:
                    costs[name].append(run(command(Path(folder) / "out")))
        return {name: Timed(tuple(found)) for name, found in costs.items()}

    def _made(self, name: str, what: str, arguments: str) -> str:
        """Have a child make something: a child starts with its parent's peak memory."""
        folder = self.root / name
        if not folder.exists():
            code = (
                f"from benchmarks.rl_setting import *; {what}(Path({str(folder)!r}), {arguments})"
            )
            run([sys.executable, "-c", code])
        return str(folder)
