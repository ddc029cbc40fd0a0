"""The rows of `make bench-weights`: contenders and bars."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial

from benchmarks.children import Cost, job
from benchmarks.rounds import Bench, Commands, Row, made, ratio_row

FLUSHED = 'cp -r "$1" "$2" && sync "$2"/*'
"""Shell command for a copy that is flushed to disk, like our artifacts."""


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


def memory_rows(bench: Bench) -> list[Row]:
    """Measure the peak memory of a merge at every size."""
    runs = bench.interleaved(_at_every_size(bench, "merge"))
    peaks = {size: series.peak_mb for size, series in runs.items()}
    low, high = min(peaks.values()), max(peaks.values())
    text = ", ".join(f"{size} B {s.peak_mb:.0f} MB ({s.peaks})" for size, s in runs.items())
    met = high <= 700 and high <= 1.1 * low
    ratio = f"{high / low:.2f}"
    return [Row("merge, peak memory", text, "itself", ratio, "<= 700 MB, 1.10", met, dict(peaks))]


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
                sys.executable, "-m", "benchmarks.consolidate", str(base), str(adapter), str(out),
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
    """Measure the conversion of a ZeRO-3 checkpoint to bf16 beside DeepSpeed's own script."""
    from benchmarks.zero import rows

    size = "0.5" if "0.5" in bench.sizes else bench.sizes[0]
    return [Row(**fields) for fields in rows(bench, size)]


def _moved(cost: Cost) -> int:
    """Return the bytes that a job read and wrote."""
    report = json.loads(cost.output.strip().splitlines()[-1])
    return int(report["read"]) + int(report["written"])


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "merge": merge_rows,
    "memory": memory_rows,
    "gather": gather_rows,
    "convert": convert_rows,
    "plan": plan_rows,
    "zero": zero_rows,
}
