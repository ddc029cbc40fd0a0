"""What a whole process costs: wall time from start to end, and its peak resident memory."""

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
    """Of one process. `peak_mb` counts pages of mapped files, as the kernel does.

    `cpu_seconds` is what its threads worked together: on a busy machine it says more than the wall.
    """

    seconds: float
    peak_mb: float
    cpu_seconds: float
    said: str = ""


def run(argv: Sequence[str]) -> Cost:
    """Run a command to its end. Raises RuntimeError with its output when it fails."""
    started = time.monotonic()
    with subprocess.Popen(
        list(argv), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        said = child.stdout.read()
        # wait4 tells the peak of this child alone; the kernel counts mapped pages as resident.
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - started
    if child.returncode:
        raise RuntimeError(f"{' '.join(argv)}: status {child.returncode}\n{said}")
    return Cost(seconds, usage.ru_maxrss / 1024, usage.ru_utime + usage.ru_stime, said)


def job(name: str, *arguments: Path | str) -> list[str]:
    """Command line of one job of `benchmarks/jobs.py`."""
    return [sys.executable, "-m", "benchmarks.jobs", name, *map(str, arguments)]


@dataclass(frozen=True)
class Series:
    """Several runs of the same thing."""

    costs: tuple[Cost, ...]

    @property
    def seconds(self) -> float:
        """Median wall time."""
        return median(cost.seconds for cost in self.costs)

    @property
    def peak_mb(self) -> float:
        """Median peak memory."""
        return median(cost.peak_mb for cost in self.costs)

    @property
    def spread(self) -> str:
        """Fastest and slowest run, seconds."""
        times = [cost.seconds for cost in self.costs]
        return f"{min(times):.2f}..{max(times):.2f}"

    @property
    def peaks(self) -> str:
        """Smallest and largest peak memory, MB."""
        found = [cost.peak_mb for cost in self.costs]
        return f"{min(found):.0f}..{max(found):.0f}"

    def __str__(self) -> str:
        """Medians and the spread of the time."""
        return f"{self.seconds:.2f} s ({self.spread}), {self.peak_mb:.0f} MB"

    def as_json(self) -> dict[str, object]:
        """Plain JSON."""
        return {
            "seconds": round(self.seconds, 3),
            "runs_s": [round(cost.seconds, 3) for cost in self.costs],
            "cpu_s": round(median(cost.cpu_seconds for cost in self.costs), 3),
            "peak_mb": round(self.peak_mb, 1),
            "peaks_mb": [round(cost.peak_mb, 1) for cost in self.costs],
        }
