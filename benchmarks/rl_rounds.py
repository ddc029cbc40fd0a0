"""Rounds of `make bench-rl`: run contenders that time themselves, and make their models."""

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
"""Words of a prompt in the row about iterations."""


@dataclass(frozen=True)
class Timed:
    """Results of one contender over all rounds."""

    costs: tuple[Cost, ...]

    @cached_property
    def reports(self) -> list[dict[str, Any]]:
        """Report of each round."""
        return [report_in(cost) for cost in self.costs]

    @property
    def runs(self) -> list[float]:
        """Seconds of each round: the median of its timed parts."""
        return [median(report["seconds"]) for report in self.reports]

    @property
    def seconds(self) -> float:
        """Median of all rounds, seconds."""
        return median(self.runs)

    @property
    def peak_mb(self) -> float:
        """Median peak memory of the process, or of its largest child, MB."""
        return median(cost.peak_mb for cost in self.costs)

    @property
    def text(self) -> str:
        """Median and range of the seconds, for the table."""
        return f"{self.seconds:.3g} s ({min(self.runs):.3g}..{max(self.runs):.3g})"

    @property
    def rate(self) -> str:
        """Median and range of tokens per second, for the table."""
        rates = [
            report["tokens"] / seconds
            for report, seconds in zip(self.reports, self.runs, strict=True)
        ]
        return f"{median(rates):.0f} tokens/s ({min(rates):.0f}..{max(rates):.0f})"

    def as_json(self) -> dict[str, object]:
        """Return times, costs of the processes and reports as plain JSON."""
        return {
            "seconds": round(self.seconds, 4),
            "runs_s": [round(seconds, 4) for seconds in self.runs],
            "cpu_s": [round(cost.cpu_seconds, 1) for cost in self.costs],
            "peak_mb": round(self.peak_mb, 1),
            "told": self.reports,
        }


def report_in(cost: Cost) -> dict[str, Any]:
    """Return the report in the output of a contender: its last line that is one.

    Raises:
        RuntimeError: there is no report.
    """
    lines = [line for line in cost.output.splitlines() if line.startswith('{"bench"')]
    if not lines:
        raise RuntimeError(f"a contender ended without a report:\n{cost.output[-2000:]}")
    report: dict[str, Any] = json.loads(lines[-1])["bench"]
    return report


Commands = Mapping[str, Callable[[Path], list[str]]]
"""Functions that return a command line, by contender; the argument is a folder to make."""


@dataclass(frozen=True)
class Bench:
    """Settings of the benchmark.

    Attributes:
        root: folder of the models.
        runs: number of rounds.
        size: size of the model for rollouts and iterations.
        handed: size of the model for weight syncs.
        dtype: torch dtype name of the iterations.
    """

    root: Path
    runs: int
    size: str
    handed: str
    dtype: str

    def base(self, size: str) -> str:
        """Return the folder of a model; made at the first call."""
        return self._made(f"base-{size}", "make_base", repr(size))

    def ending_base(self, size: str) -> str:
        """Return the folder of a model whose responses end with EOS at random."""
        return self._made(f"ending-base-{size}", "make_ending_base", repr(size))

    def adapter(self, size: str) -> str:
        """Return the folder of an adapter for the model."""
        return self._made(f"adapter-{size}", "make_adapter", repr(self.base(size)))

    def prompts(self, size: str) -> str:
        """Return the folder of a dataset of prompts."""
        words = f"vocabulary={SIZES[size].vocabulary}, count=64, length={QUESTION_WORDS}"
        return self._made(f"prompts-{size}", "make_prompts", words)

    def interleaved(self, commands: Commands) -> dict[str, Timed]:
        """Run every contender once per round."""
        costs: dict[str, list[Cost]] = {name: [] for name in commands}
        for _ in range(self.runs):
            for name, command in commands.items():
                with tempfile.TemporaryDirectory(dir=self.root) as folder:
                    costs[name].append(run(command(Path(folder) / "out")))
        return {name: Timed(tuple(runs)) for name, runs in costs.items()}

    def _made(self, name: str, what: str, arguments: str) -> str:
        """Call a function of `rl_setting` in a child, because children inherit peak memory."""
        folder = self.root / name
        if not folder.exists():
            code = (
                f"from benchmarks.rl_setting import *; {what}(Path({str(folder)!r}), {arguments})"
            )
            run([sys.executable, "-c", code])
        return str(folder)
