"""`make bench-training`: training beside TRL and a bare loop, in one run; a table and a JSON line.

    make bench-training ARGS='sft memory --runs 3'

Contenders take turns in every round, each in a process of its own, with the same model, data, LoRA
rank, number format, rows a batch and threads. A rate counts real tokens, and every optimizer step
after the first. TRL runs as it comes: padded batches; gradient checkpointing is off for everybody,
but in the row about memory, where it is on for everybody.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.asking import asked, asking
from benchmarks.children import Cost, run
from benchmarks.report import table
from benchmarks.rounds import Row
from benchmarks.training_setting import MICRO, SHAPES, TIMED, WARM, draw_lengths

STEPS = WARM + TIMED
LOGITS_TOKENS = 1000
"""Tokens of each of the four sequences in the row about memory."""


@dataclass(frozen=True)
class Rates:
    """One contender over all rounds."""

    costs: tuple[Cost, ...]

    @property
    def rates(self) -> list[float]:
        """Real tokens a second, of each round."""
        said = [heard(cost)["steps"] for cost in self.costs]
        return [sum(n for n, _ in steps) / sum(s for _, s in steps) for steps in said]

    @property
    def rate(self) -> float:
        """Their median."""
        return median(self.rates)

    @property
    def peak_mb(self) -> float:
        """Median peak memory of the process, or of its largest child."""
        return median(cost.peak_mb for cost in self.costs)

    @property
    def text(self) -> str:
        """For a cell of the table."""
        low, high = min(self.rates), max(self.rates)
        return f"{self.rate:.0f} tokens/s ({low:.0f}..{high:.0f})"

    def as_json(self) -> dict[str, object]:
        """Plain JSON; `seconds` and `runs_s` are those of a thousand tokens, for the plot."""
        return {
            "tokens_per_s": [round(rate, 1) for rate in self.rates],
            "seconds": round(1000 / self.rate, 3),
            "runs_s": [round(1000 / rate, 3) for rate in self.rates],
            "peak_mb": round(self.peak_mb, 1),
        }


def heard(cost: Cost) -> dict[str, Any]:
    """The last line of a contender that is its report."""
    lines = [line for line in cost.said.splitlines() if line.startswith('{"steps"')]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@dataclass(frozen=True)
class Bench:
    """Where things lie, how often they are run, and how many conversations a batch has."""

    root: Path
    runs: int
    shape: str
    dtype: str
    rows: int = MICRO

    def base(self, shape: str) -> Path:
        """A model; made when first asked for."""
        folder = self.root / f"base-{shape}"
        if not folder.exists():
            _made("make_base", folder, repr(shape))
        return folder

    def data(self, name: str, lengths: Sequence[int], shape: str, *, pairs: bool = False) -> Path:
        """A dataset of these lengths; made when first asked for."""
        folder = self.root / f"data-{name}"
        if not folder.exists():
            words = SHAPES[shape].vocabulary
            _made("make_data", folder, f"vocabulary={words}, lengths={lengths!r}, pairs={pairs}")
        return folder

    def interleaved(
        self, names: Sequence[str], base: Path, data: Path, runs: int | None = None, **ask: Any
    ) -> dict[str, Rates]:
        """Every contender once a round."""
        costs: dict[str, list[Cost]] = {name: [] for name in names}
        for _ in range(runs or self.runs):
            for name in names:
                with tempfile.TemporaryDirectory(dir=self.root) as folder:
                    out = Path(folder) / "out"
                    places = [str(path) for path in (base, data, out)]
                    argv = [sys.executable, "-m", "benchmarks.training_jobs", name, *places]
                    costs[name].append(run([*argv, json.dumps({"dtype": self.dtype, **ask})]))
        return {name: Rates(tuple(found)) for name, found in costs.items()}


def _made(what: str, folder: Path, arguments: str) -> None:
    """Have a child make something: a child starts with its parent's peak memory, so stay small."""
    code = f"from benchmarks.training_setting import *; {what}(Path({str(folder)!r}), {arguments})"
    run([sys.executable, "-c", code])


def sft_rows(bench: Bench) -> list[Row]:
    """LoRA SFT beside TRL, a padded loop, and the bare loop over our own rows."""
    data = bench.data("sft", draw_lengths(STEPS * bench.rows), bench.shape)
    names = ("ours", "trl", "padded", "bare")
    ask = {"steps": STEPS, "rows": bench.rows}
    timed = bench.interleaved(names, bench.base(bench.shape), data, **ask)
    detail = {name: rates.as_json() for name, rates in timed.items()}
    what = f"SFT, LoRA, {bench.shape}, {bench.dtype}"
    shares = [share for cost in timed["ours"].costs for share in heard(cost)["mfu"]]
    used = f", MFU {median(shares):.1%}" if shares else ""
    over = timed["bare"].rate / timed["ours"].rate - 1
    return [
        _faster(f"{what}, vs TRL{used}", timed["ours"], timed["trl"], 1.5, detail),
        _faster(f"{what}, vs padded batches", timed["ours"], timed["padded"], 1.3, {}),
        Row(
            f"{what}, our loop over the bare one", timed["ours"].text, timed["bare"].text,
            f"{over:+.1%}", "<= +3 %", over <= 0.03, {},
        ),
    ]  # fmt: skip


def dpo_rows(bench: Bench) -> list[Row]:
    """LoRA DPO beside TRL."""
    pairs = bench.rows // 2
    data = bench.data("dpo", draw_lengths(STEPS * pairs), bench.shape, pairs=True)
    ask = {"objective": "dpo", "steps": STEPS, "rows": pairs}
    found = bench.interleaved(("ours", "trl"), bench.base(bench.shape), data, **ask)
    detail = {name: rates.as_json() for name, rates in found.items()}
    what = f"DPO, LoRA, {bench.shape}, {bench.dtype}, vs TRL"
    return [_faster(what, found["ours"], found["trl"], 1.5, detail)]


def memory_rows(bench: Bench) -> list[Row]:
    """Peak memory with a vocabulary of 152 thousand and 4 thousand tokens in a batch."""
    data = bench.data("wide", [LOGITS_TOKENS] * 4, "wide")
    ask = {"steps": 1, "rows": 4, "checkpointing": True}
    found = bench.interleaved(("ours", "trl"), bench.base("wide"), data, runs=1, **ask)
    ours, peer = found["ours"].peak_mb, found["trl"].peak_mb
    ratio = ours / peer
    what = f"SFT, LoRA, vocabulary 152 k, 4 k tokens, {bench.dtype}, peak memory"
    texts = [f"{peak:.0f} MB" for peak in (ours, peer)]
    detail = {name: {"peak_mb": rates.peak_mb} for name, rates in found.items()}
    return [Row(what, *texts, f"{ratio:.2f}", "<= 0.5", ratio <= 0.5, detail)]


def start_rows(bench: Bench) -> list[Row]:
    """From the call of the stage to the end of its first step, two ranks, a toy."""
    data = bench.data("toy", [40] * 16, "tiny")
    ask = {"steps": 1, "nproc": 2, "rows": 4}
    costs = bench.interleaved(("ours",), bench.base("tiny"), data, **ask)["ours"].costs
    times = [heard(cost)["first_step_s"] for cost in costs]
    text = f"{median(times):.1f} s ({min(times):.1f}..{max(times):.1f})"
    detail = {"ours": {"first_step_s": times}}
    met = median(times) <= 10
    return [Row("start to first step, two ranks, toy", text, "-", "-", "<= 10 s", met, detail)]


def _faster(what: str, ours: Rates, peer: Rates, bar: float, detail: Mapping[str, object]) -> Row:
    ratio = ours.rate / peer.rate
    return Row(what, ours.text, peer.text, f"{ratio:.2f}", f">= {bar:g}", ratio >= bar, detail)


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "sft": sft_rows,
    "dpo": dpo_rows,
    "memory": memory_rows,
    "start": start_rows,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the asked rows; print the table and the JSON line."""
    parser = asking("training", __doc__, ROWS)
    parser.add_argument("--shape", default="100M", choices=list(SHAPES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    given = asked(parser, ROWS, arguments)
    folder = Path(tempfile.mkdtemp(dir=given.root)).resolve()
    try:
        bench = Bench(folder, given.runs, given.shape, given.dtype)
        rows = [row for name in given.rows for row in ROWS[name](bench)]
    finally:
        shutil.rmtree(folder)
    print(table(rows))
    machine = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}
    print(json.dumps({"bench": "training", **machine, "rows": [vars(row) for row in rows]}))


if __name__ == "__main__":
    main()
