"""Time to resolve a finished stage: key, lock, manifest and verification of the artifact.

    python -m benchmarks.resolve [--artifacts 1000] [--tensors 339] [--runs 50]

A run resolves seven stages before it knows that nothing is left to do. Prefect and MLflow are left
out, since they take the same time however many artifacts there are.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from benchmarks.report import Row, table
from tasks.pipeline.stage import Mechanism, Stage, StageReport
from tasks.tracking.tracker import Tracker

BAR_MS = 50.0
STAGE = Stage("write", "served", stack=("torch", "safetensors"))


def write(out: Path, *, number: int, tensors: int, log: object) -> StageReport:
    """Fill an artifact with as many small tensors as a model of 7 billion parameters has."""
    names = {f"model.layers.{i}.weight": np.full(2, number, np.float32) for i in range(tensors)}
    save_file(names, out / "model.safetensors")
    return StageReport("served", checks=())


@contextlib.contextmanager
def store(artifacts: int, tensors: int) -> Iterator[Mechanism]:
    """Yield a mechanism over a new store with so many artifacts."""
    log = logging.getLogger(__name__)
    with tempfile.TemporaryDirectory() as folder:
        mechanism = Mechanism(
            Path(folder) / "artifacts",
            Path(folder) / "logs",
            Tracker("", "", None, Path()),
            lambda name, work, inputs: work(log),
        )
        with mechanism.tracker.flow("benchmark", {}, "", {}):
            for number in range(artifacts):
                resolve(mechanism, number, tensors)
            yield mechanism


def resolve(mechanism: Mechanism, number: int, tensors: int) -> bool:
    """Run the stage of one artifact. Returns True if it was reused."""
    config = {"number": number, "tensors": tensors}
    return mechanism.run(STAGE, write, inputs={}, config=config).reused


def measure(artifacts: int, tensors: int, runs: int) -> list[float]:
    """Return the milliseconds of `runs` resolves of random artifacts."""
    times = []
    with store(artifacts, tensors) as mechanism:
        for number in random.Random(0).choices(range(artifacts), k=runs):
            begin = time.perf_counter()
            reused = resolve(mechanism, number, tensors)
            times.append(1000 * (time.perf_counter() - begin))
            assert reused, "the artifact was made again"
    return times


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the row and a JSON line. Returns 1 if the bar is missed."""
    parser = argparse.ArgumentParser(prog="bench-resolve", description=__doc__)
    for name, value in (("artifacts", 1000), ("tensors", 339), ("runs", 50)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args(arguments)
    times = measure(options.artifacts, options.tensors, options.runs)
    middle = median(times)
    row = Row(
        f"resolve a finished stage among {options.artifacts} artifacts",
        f"{middle:.1f} ms ({min(times):.1f}..{max(times):.1f})",
        "-",
        "-",
        f"<= {BAR_MS:g} ms",
        middle <= BAR_MS,
        {"ms": times},
    )
    print(table([row]))
    result: dict[str, Any] = {"bench": "resolve", "rows": [vars(row)]}
    print(json.dumps(result))
    return 0 if row.met else 1


if __name__ == "__main__":
    sys.exit(main())
