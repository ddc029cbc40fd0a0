"""Run a command in a child process, and measure its wall time and peak resident memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Cost:
    """Cost of one process.

    Attributes:
        seconds: wall time.
        peak_mb: peak resident memory, MB, with pages of mapped files.
        cpu_seconds: CPU time of all threads; on a busy machine more reliable than wall time.
        output: stdout and stderr.
    """

    seconds: float
    peak_mb: float
    cpu_seconds: float
    output: str = ""


def run(argv: Sequence[str]) -> Cost:
    """Run a command to its end. Raises RuntimeError with its output if it fails."""
    started = time.monotonic()
    with subprocess.Popen(
        list(argv), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        output = child.stdout.read()
        # wait4 returns the peak of this child alone.
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - started
    if child.returncode:
        raise RuntimeError(f"{' '.join(argv)}: status {child.returncode}\n{output}")
    return Cost(seconds, usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime, output)


def job(name: str, *arguments: Path | str) -> list[str]:
    """Return the command line of a job in `benchmarks/jobs.py`."""
    return [sys.executable, "-m", "benchmarks.jobs", name, *map(str, arguments)]


@dataclass(frozen=True)
class Series:
    """Costs of several runs of one command."""

    costs: tuple[Cost, ...]

    @property
    def seconds(self) -> float:
        """Median wall time, seconds."""
        return median(cost.seconds for cost in self.costs)

    @property
    def peak_mb(self) -> float:
        """Median peak memory, MB."""
        return median(cost.peak_mb for cost in self.costs)

    @property
    def spread(self) -> str:
        """Fastest and slowest run, seconds."""
        times = [cost.seconds for cost in self.costs]
        return f"{min(times):.2f}..{max(times):.2f}"

    @property
    def peaks(self) -> str:
        """Smallest and largest peak memory, MB."""
        peaks = [cost.peak_mb for cost in self.costs]
        return f"{min(peaks):.0f}..{max(peaks):.0f}"

    def __str__(self) -> str:
        """Return the medians, with the spread of the time."""
        return f"{self.seconds:.2f} s ({self.spread}), {self.peak_mb:.0f} MB"

    def as_json(self) -> dict[str, object]:
        """Return medians and single runs as plain JSON."""
        return {
            "seconds": round(self.seconds, 3),
            "runs_s": [round(cost.seconds, 3) for cost in self.costs],
            "cpu_s": round(median(cost.cpu_seconds for cost in self.costs), 3),
            "peak_mb": round(self.peak_mb, 1),
            "peaks_mb": [round(cost.peak_mb, 1) for cost in self.costs],
        }
