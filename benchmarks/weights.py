"""`make bench-weights`: merge, gather, convert and plan, beside other tools.

    make bench-weights ARGS='merge convert --sizes 0.5 1.5 3 --runs 3'

Models are made for the run. Contenders take turns in every round, each in its own process. Wall
time is that of the whole process, with interpreter start and imports. Memory is the peak resident
set, with mapped pages. A run of all rows and sizes also goes into `docs/`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.contenders.zero import RANKS
from benchmarks.harness import (
    RUNS,
    Commands,
    Cost,
    Results,
    in_turns,
    make_input,
    make_parser,
    parse,
    run,
)
from benchmarks.report import Row, document, table, write_docs
from benchmarks.shapes import SIZES
from tasks.process.child import PROJECT

ALL_SIZES = ["0.5", "1.5", "3"]
FLUSHED = 'cp -r "$1" "$2" && sync "$2"/*'
"""Shell command for a copy that is flushed to disk, like our artifacts."""


@dataclass(frozen=True)
class Series(Results):
    """Wall time and memory of one contender."""

    @property
    def seconds(self) -> float:
        """Median wall time, seconds."""
        return median(cost.seconds for cost in self.costs)

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
        costs = in_turns(commands, self.runs + 1, self.root)
        # The first round warms the page cache.
        return {name: Series(runs[1:]) for name, runs in costs.items()}


def made(kind: str, folder: Path, *arguments: str) -> None:
    """Make a model or adapter in a child, because children inherit their parent's peak memory."""
    run([sys.executable, "-m", "benchmarks.synthetic", kind, str(folder), *arguments])


def ratio_row(what: str, ours: Series, peer: Series, bar: float, detail: dict[str, object]) -> Row:
    """Return the row for our wall time divided by another tool's, which must not exceed `bar`."""
    ratio = ours.seconds / peer.seconds
    return Row(what, str(ours), str(peer), f"{ratio:.2f}", f"<= {bar:g}", ratio <= bar, detail)


def job(name: str, *arguments: Path | str) -> list[str]:
    """Return the command line of a job in `benchmarks/contenders/weights.py`."""
    return [sys.executable, "-m", "benchmarks.contenders.weights", name, *map(str, arguments)]


def merge_rows(bench: Bench) -> list[Row]:
    """Measure a merge beside peft and `cp -r`."""
    size = bench.middle
    base, adapter = bench.model(size)
    runs = bench.interleaved(
        {
            "ours": partial(job, "merge", base, adapter),
            "cp": lambda out: ["cp", "-r", str(base), str(out)],
            "cp, flushed": lambda out: ["sh", "-c", FLUSHED, "sh", str(base), str(out)],
            "peft": partial(job, "peft-merge", base, adapter),
        }
    )
    detail: dict[str, object] = {name: series.as_json() for name, series in runs.items()}
    return [
        ratio_row(f"merge, {size} B, vs peft", runs["ours"], runs["peft"], 0.25, detail),
        ratio_row(f"merge, {size} B, vs cp -r", runs["ours"], runs["cp"], 2.0, {}),
        ratio_row(
            f"merge, {size} B, vs cp -r and sync", runs["ours"], runs["cp, flushed"], 2.0, {}
        ),
    ]


def deliver_rows(bench: Bench) -> list[Row]:
    """Measure a whole delivery without a smoke test beside `cp` and `sync` of the base."""
    size = bench.middle
    base, adapter = bench.model(size)
    whole = make_input(bench.root / f"download-{size}", "make_download", base=str(base))
    flow, quiet = PROJECT / "flows" / "deliver.py", ("smoke.engine=none", "merge.base=original")
    runs = bench.interleaved(
        {
            "ours": lambda out: [
                sys.executable, str(flow), f"source={adapter}", f"base={whole}", *quiet,
                f"out={out}", f"paths.runs={out.with_name('runs')}",
            ],
            "cp, flushed": lambda out: ["sh", "-c", FLUSHED, "sh", str(base), str(out)],
        }
    )  # fmt: skip
    detail: dict[str, object] = {name: series.as_json() for name, series in runs.items()}
    what = f"deliver, {size} B, vs cp -r and sync"
    return [ratio_row(what, runs["ours"], runs["cp, flushed"], 2.2, detail)]


def memory_rows(bench: Bench) -> list[Row]:
    """Measure the peak memory of a merge at every size."""
    runs = bench.interleaved(_at_every_size(bench, "merge"))
    peaks = {size: series.peak_mb for size, series in runs.items()}
    low, high = min(peaks.values()), max(peaks.values())
    text = ", ".join(f"{size} B {s.peak_mb:.0f} MB ({s.peaks})" for size, s in runs.items())
    met = high <= 300 and high <= 1.1 * low
    ratio = f"{high / low:.2f}"
    return [Row("merge, peak memory", text, "itself", ratio, "<= 300 MB, 1.10", met, dict(peaks))]


def _at_every_size(bench: Bench, name: str) -> Commands:
    """Return the commands of a job, one for each size."""
    folders = {size: bench.model(size) for size in bench.sizes}
    inputs = {size: both if name == "merge" else both[:1] for size, both in folders.items()}
    return {size: partial(job, name, *paths) for size, paths in inputs.items()}


def gather_rows(bench: Bench) -> list[Row]:
    """Measure the gathering of an adapter beside rank-0 consolidation of the whole model."""
    size = bench.middle
    base, adapter = bench.model(size)
    shards = bench.root / f"shards-{size}"
    if not shards.exists():
        made("shards", shards, size)
    runs = bench.interleaved(
        {
            "ours": partial(job, "gather", shards),
            "rank 0": lambda out: [
                sys.executable, "-m", "benchmarks.contenders.consolidate",
                str(base), str(adapter), str(out),
            ],
        }
    )  # fmt: skip
    moved = {name: _moved(series.costs[0]) for name, series in runs.items()}
    ratio = moved["ours"] / moved["rank 0"]
    texts = [f"{moved[name] / 1e6:.0f} MB" for name in ("ours", "rank 0")]
    detail: dict[str, object] = {name: series.as_json() for name, series in runs.items()}
    name = f"gather, rank 64, {size} B base"
    return [
        ratio_row(f"{name}, time", runs["ours"], runs["rank 0"], 0.1, detail),
        Row(f"{name}, bytes", texts[0], texts[1], f"{ratio:.3f}", "<= 0.1", ratio <= 0.1, {}),
    ]


def convert_rows(bench: Bench) -> list[Row]:
    """Measure a convert that changes nothing, at every size."""
    runs = bench.interleaved(_at_every_size(bench, "convert"))
    return [
        Row(
            f"convert, nothing changes, {size} B", str(ours), "-", "-", "<= 1 s",
            ours.seconds <= 1.0, ours.as_json(),
        )
        for size, ours in runs.items()
    ]  # fmt: skip


def plan_rows(bench: Bench) -> list[Row]:
    """Measure planning and validation of a merge of 400 GB in 100 shards."""
    base, adapter = bench.root / "sparse" / "base", bench.root / "sparse" / "adapter"
    if not base.exists():
        made("sparse", base.parent)
    ours = bench.interleaved({"ours": lambda out: job("plan", base, adapter)})["ours"]
    report = json.loads(ours.costs[0].output.splitlines()[-1])
    met = ours.seconds <= 3 and ours.peak_mb <= 300
    what = f"plan and validate {report['files']} shards, {report['bytes'] / 1e9:.0f} GB"
    return [Row(what, str(ours), "-", "-", "<= 3 s, 300 MB", met, ours.as_json())]


def zero_rows(bench: Bench) -> list[Row]:
    """Measure the conversion of a ZeRO-3 checkpoint to bf16 beside DeepSpeed's own scripts.

    `zero_to_fp32` writes fp32, twice the bytes; `zero_to_torch` can write bf16.
    """
    size = "0.5" if "0.5" in bench.sizes else bench.sizes[0]
    source = bench.root / f"zero3-{size}"
    if not source.exists():
        run(_zero("make", source, size))
    safe = [str(source), "--safe_serialization"]
    scripts = {name: str(source / f"{name}.py") for name in ("zero_to_fp32", "zero_to_torch")}
    runs = bench.interleaved(
        {
            "ours": partial(_zero, "convert", source),
            "zero_to_fp32": lambda out: [
                sys.executable, scripts["zero_to_fp32"], safe[0], str(out), safe[1],
            ],
            "zero_to_torch": lambda out: [
                sys.executable, scripts["zero_to_torch"], safe[0], str(out), safe[1],
                "--dtype", "bfloat16",
            ],
        }
    )  # fmt: skip
    detail: dict[str, object] = {name: series.as_json() for name, series in runs.items()}
    ours, peer = runs["ours"], runs["zero_to_fp32"]
    what = f"ZeRO-3, {RANKS} ranks -> bf16 model, {size} B"
    times = [f"{series.seconds:.2f} s ({series.spread})" for series in (ours, peer)]
    peaks = [f"{series.peak_mb:.0f} MB" for series in (ours, peer)]
    time, memory = ours.seconds / peer.seconds, ours.peak_mb / peer.peak_mb
    return [
        Row(f"{what}, time", *times, f"{time:.2f}", "<= 0.33", time <= 1 / 3, detail),
        Row(f"{what}, memory", *peaks, f"{memory:.3f}", "<= 0.25", memory <= 1 / 4, {}),
    ]


def _zero(job: str, *arguments: Path | str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.contenders.zero", job, *map(str, arguments)]


def _moved(cost: Cost) -> int:
    """Return the bytes that a job read and wrote."""
    report = json.loads(cost.output.strip().splitlines()[-1])
    return int(report["read"]) + int(report["written"])


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "merge": merge_rows,
    "deliver": deliver_rows,
    "memory": memory_rows,
    "gather": gather_rows,
    "convert": convert_rows,
    "plan": plan_rows,
    "zero": zero_rows,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the selected rows; print the table and the JSON line."""
    options = _options(arguments)
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        bench = Bench(Path(folder).resolve(), options.runs, options.sizes)
        rows = [row for name in options.rows for row in ROWS[name](bench)]
    results = document(rows, options.runs)
    print(table(rows))
    print(json.dumps(results))
    if options.rows == list(ROWS) and options.sizes == ALL_SIZES and options.runs >= RUNS:
        write_docs(options.docs, rows, results)
    else:
        print(f"{options.docs} is left as it is: not every row, every size and {RUNS} runs")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("weights", __doc__, ROWS)
    parser.add_argument("--sizes", nargs="+", default=ALL_SIZES, choices=list(SIZES))
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="for a whole run's result")
    return parse(parser, ROWS, arguments)


if __name__ == "__main__":
    main()
