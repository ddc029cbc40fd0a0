"""`make bench-weights`: the weights room beside its peers, in one run; a table and a JSON line.

    make bench-weights ARGS='merge convert --sizes 0.5 1.5 3 --runs 3'

Models are made on the spot. Peers take turns with us in every round, each in a process of its own;
wall time is that of the whole process, interpreter start and imports included, and memory is the
peak resident set, mapped pages included.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.children import Cost, Series, job, run
from benchmarks.synthetic import SIZES

FLUSHED = 'cp -r "$1" "$2" && sync "$2"/*'
"""A copy that survives a power cut, as every artifact does that we publish."""


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


@dataclass(frozen=True)
class Bench:
    """Where models lie, and how often things are run."""

    root: Path
    runs: int
    sizes: Sequence[str]

    def model(self, size: str) -> tuple[Path, Path]:
        """A base and its adapter; made when first asked for."""
        base, adapter = self.root / f"base-{size}", self.root / f"adapter-{size}"
        if not base.exists():
            made("base", base, size)
            made("adapter", adapter, size)
        return base, adapter

    def forget(self, size: str) -> None:
        """Remove a model, to keep disk use small."""
        for path in self.model(size):
            shutil.rmtree(path)

    def interleaved(self, commands: dict[str, Callable[[Path], list[str]]]) -> dict[str, Series]:
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


def merge_rows(bench: Bench) -> list[Row]:
    """Merge beside peft and `cp -r`, 1.5 B where that is among the sizes."""
    size = "1.5" if "1.5" in bench.sizes else bench.sizes[0]
    base, adapter = bench.model(size)
    found = bench.interleaved(
        {
            "ours": partial(job, "merge", base, adapter),
            "cp": lambda out: ["cp", "-r", str(base), str(out)],
            "cp, flushed": lambda out: ["sh", "-c", FLUSHED, "sh", str(base), str(out)],
            "peft": partial(job, "peft-merge", base, adapter),
        }
    )
    detail: dict[str, object] = {name: series.as_json() for name, series in found.items()}
    return [
        _ratio(f"merge, {size} B, vs peft", found["ours"], found["peft"], 0.25, detail),
        _ratio(f"merge, {size} B, vs cp -r", found["ours"], found["cp"], 2.0, {}),
        _ratio(f"merge, {size} B, vs cp -r and sync", found["ours"], found["cp, flushed"], 2.0, {}),
    ]


def memory_rows(bench: Bench) -> list[Row]:
    """Peak memory of a merge at every size."""
    peaks: dict[str, float] = {}
    for size in bench.sizes:
        folders = bench.model(size)
        merge = partial(job, "merge", *folders)
        peaks[size] = bench.interleaved({"ours": merge})["ours"].peak_mb
        if size != "1.5":
            bench.forget(size)
    low, high = min(peaks.values()), max(peaks.values())
    text = ", ".join(f"{size} B {peak:.0f} MB" for size, peak in peaks.items())
    met = high <= 700 and high <= 1.1 * low
    return [
        Row(
            "merge, peak memory", text, "itself", f"{high / low:.2f}", "<= 700 MB, 1.10", met, peaks
        )
    ]


def gather_rows(bench: Bench) -> list[Row]:
    """An adapter from our shards, beside rank-0 consolidation of the whole model."""
    size = "1.5" if "1.5" in bench.sizes else bench.sizes[0]
    base, adapter = bench.model(size)
    shards = bench.root / f"shards-{size}"
    if not shards.exists():
        made("shards", shards, size)
    found = bench.interleaved(
        {
            "ours": partial(job, "gather", shards),
            "rank 0": lambda out: [
                sys.executable, "-m", "benchmarks.consolidate", str(base), str(adapter), str(out),
            ],
        }
    )  # fmt: skip
    moved = {name: _moved(series.costs[0]) for name, series in found.items()}
    ratio = moved["ours"] / moved["rank 0"]
    texts = [f"{moved[name] / 1e6:.0f} MB" for name in ("ours", "rank 0")]
    detail: dict[str, object] = {name: series.as_json() for name, series in found.items()}
    name = f"gather, rank 64, {size} B base"
    return [
        _ratio(f"{name}, time", found["ours"], found["rank 0"], 0.1, detail),
        Row(f"{name}, bytes", texts[0], texts[1], f"{ratio:.3f}", "<= 0.1", ratio <= 0.1, {}),
    ]


def convert_rows(bench: Bench) -> list[Row]:
    """Convert where nothing changes."""
    rows = []
    for size in bench.sizes:
        base, _ = bench.model(size)
        ours = bench.interleaved({"ours": partial(job, "convert", base)})["ours"]
        text = f"{ours.seconds:.2f} s ({ours.spread})"
        rows.append(
            Row(
                f"convert, nothing changes, {size} B", text, "-", "-", "<= 1 s",
                ours.seconds <= 1.0, ours.as_json(),
            )
        )  # fmt: skip
    return rows


def plan_rows(bench: Bench) -> list[Row]:
    """Plan and validate 400 GB in 100 shards."""
    base, adapter = bench.root / "sparse" / "base", bench.root / "sparse" / "adapter"
    if not base.exists():
        made("sparse", base.parent)
    ours = bench.interleaved({"ours": lambda out: job("plan", base, adapter)})["ours"]
    said = json.loads(ours.costs[0].said.splitlines()[-1])
    text = f"{ours.seconds:.2f} s ({ours.spread}), {ours.peak_mb:.0f} MB"
    met = ours.seconds <= 3 and ours.peak_mb <= 300
    what = f"plan and validate {said['files']} shards, {said['bytes'] / 1e9:.0f} GB"
    return [Row(what, text, "-", "-", "<= 3 s, 300 MB", met, ours.as_json())]


def zero_rows(bench: Bench) -> list[Row]:
    """A ZeRO-3 checkpoint of 4 ranks to a bf16 model, beside DeepSpeed's own script."""
    from benchmarks.zero import rows

    size = "0.5" if "0.5" in bench.sizes else bench.sizes[0]
    return [Row(**fields) for fields in rows(bench, size)]


def _ratio(what: str, ours: Series, peer: Series, bar: float, detail: dict[str, object]) -> Row:
    ratio = ours.seconds / peer.seconds
    texts = [f"{s.seconds:.2f} s ({s.spread}), {s.peak_mb:.0f} MB" for s in (ours, peer)]
    met = ratio <= bar
    return Row(what, texts[0], texts[1], f"{ratio:.2f}", f"<= {bar:g}", met, detail)


def _moved(cost: Cost) -> int:
    said = json.loads(cost.said.strip().splitlines()[-1])
    return int(said["read"]) + int(said["written"])


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "merge": merge_rows,
    "memory": memory_rows,
    "gather": gather_rows,
    "convert": convert_rows,
    "plan": plan_rows,
    "zero": zero_rows,
}


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| what | ours | against | ratio | must reach | met |", "|---|---|---|---|---|---|"]
    for row in rows:
        cells = (row.what, row.ours, row.against, row.ratio, row.bar, "yes" if row.met else "no")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the asked rows; print the table and the JSON line."""
    parser = argparse.ArgumentParser(prog="bench-weights", description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; all when none is named")
    parser.add_argument("--sizes", nargs="+", default=["0.5", "1.5", "3"], choices=list(SIZES))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--root", type=Path, default=Path(".cache/bench"))
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.rows) - set(ROWS))
    if unknown:
        parser.error(f"no row {unknown[0]}; there are {', '.join(ROWS)}")
    asked.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.root) as folder:
        bench = Bench(Path(folder).resolve(), asked.runs, asked.sizes)
        rows = [row for name in asked.rows or ROWS for row in ROWS[name](bench)]
    print(table(rows))
    machine = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}
    print(json.dumps({"bench": "weights", **machine, "rows": [vars(row) for row in rows]}))


if __name__ == "__main__":
    main()
