"""Run contenders in turns, each in its own process, and measure their time and memory.

A contender writes to a fresh folder. One that times itself prints its report with `say`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = 3


def make_parser(bench: str, about: str | None, rows: Iterable[str]) -> argparse.ArgumentParser:
    """Return the parser of `bench-<bench>`, to which options can be added.

    Args:
        bench: name of the benchmark.
        about: its description.
        rows: names of its rows.
    """
    parser = argparse.ArgumentParser(prog=f"bench-{bench}", description=about)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(rows)}; all when none is named")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--root", type=Path, default=Path(".cache/bench"), help="for the models")
    return parser


def parse(
    parser: argparse.ArgumentParser, rows: Iterable[str], arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parse the command line. `rows` are all rows if none is named; the folder `root` is made.

    Raises:
        SystemExit: an unknown row, or a wrong option.
    """
    options, known = parser.parse_args(arguments), list(rows)
    unknown = sorted(set(options.rows) - set(known))
    if unknown:
        parser.error(f"no row {unknown[0]}; there are {', '.join(known)}")
    options.rows = options.rows or known
    options.root.mkdir(parents=True, exist_ok=True)
    return options


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


def say(**report: Any) -> None:
    """Print the report of a contender for the parent process."""
    print(json.dumps({"bench": report}), flush=True)


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


@dataclass(frozen=True)
class Results:
    """Costs of one contender over all rounds."""

    costs: tuple[Cost, ...]

    @cached_property
    def reports(self) -> list[dict[str, Any]]:
        """Report of each round."""
        return [report_in(cost) for cost in self.costs]

    @property
    def peak_mb(self) -> float:
        """Median peak memory of the process, or of its largest child, MB."""
        return median(cost.peak_mb for cost in self.costs)


Commands = Mapping[str, Callable[[Path], list[str]]]
"""Functions that return a command line, by contender; the argument is the folder to make."""


def in_turns(commands: Commands, rounds: int, root: Path) -> dict[str, tuple[Cost, ...]]:
    """Run every command once per round.

    Args:
        commands: command lines of the contenders.
        rounds: number of rounds.
        root: folder for what they write, which is removed afterwards.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            os.sync()  # or the next contender would wait for the last one's data
            with tempfile.TemporaryDirectory(dir=root) as folder:
                costs[name].append(run(command(Path(folder) / "out")))
    return {name: tuple(runs) for name, runs in costs.items()}


def make_input(folder: Path, function: str, **arguments: Any) -> Path:
    """Return a folder; if it does not exist, a function of `benchmarks.inputs` makes it.

    The function runs in a child, because children inherit their parent's peak memory.
    """
    if not folder.exists():
        values = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        code = f"from benchmarks.inputs import *; {function}(Path({str(folder)!r}), {values})"
        run([sys.executable, "-c", code])
    return folder
