"""`make bench-training`: SFT and DPO beside TRL and bare PyTorch loops.

    make bench-training ARGS='sft memory --runs 3'
    make bench-training ARGS=smollm2                 the real model of the demo, on its rows

Contenders take turns in every round, each in its own process, with the same model, data, LoRA rank,
dtype, rows per batch and threads. A rate counts tokens without padding, over all optimizer steps
but the first. TRL runs with its defaults (padded batches). Gradient checkpointing is off, except in
the row about memory, where all contenders use it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.contenders.training import MICRO
from benchmarks.harness import Results, in_turns, make_input, make_parser, parse
from benchmarks.inputs import SHAPES, draw_conversation_lengths
from benchmarks.report import Row, table

STEPS = 5
"""Optimizer steps of a run; the first one warms up."""
LOGITS_TOKENS = 1000
"""Tokens of each of the four sequences in the row about memory."""


@dataclass(frozen=True)
class Rates(Results):
    """Tokens per second of one contender."""

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each round, without padding."""
        rounds = [report["steps"] for report in self.reports]
        return [sum(n for n, _ in steps) / sum(s for _, s in steps) for steps in rounds]

    @property
    def rate(self) -> float:
        """Median of all rounds, tokens per second."""
        return median(self.rates)

    @property
    def text(self) -> str:
        """Median and range of the rate, for the table."""
        low, high = min(self.rates), max(self.rates)
        return f"{self.rate:.0f} tokens/s ({low:.0f}..{high:.0f})"

    def as_json(self) -> dict[str, object]:
        """Return rates and memory as plain JSON; `seconds` and `runs_s` are per thousand tokens."""
        return {
            "tokens_per_s": [round(rate, 1) for rate in self.rates],
            "seconds": round(1000 / self.rate, 3),
            "runs_s": [round(1000 / rate, 3) for rate in self.rates],
            "peak_mb": round(self.peak_mb, 1),
        }


@dataclass(frozen=True)
class Bench:
    """Settings of the benchmark.

    Attributes:
        root: folder of models and data.
        runs: number of rounds.
        shape: shape of the model, a key of `SHAPES`.
        dtype: torch dtype name.
        rows: conversations per batch.
    """

    root: Path
    runs: int
    shape: str
    dtype: str
    rows: int = MICRO

    def base(self, shape: str) -> Path:
        """Return the folder of a model in fp32; made at the first call."""
        return make_input(
            self.root / f"base-{shape}", "write_llama", size=SHAPES[shape], dtype="float32"
        )

    def data(self, name: str, lengths: Sequence[int], shape: str, *, pairs: bool = False) -> Path:
        """Return the folder of a dataset with these lengths in tokens; made at the first call."""
        return make_input(
            self.root / f"data-{name}",
            "make_conversations",
            vocabulary=SHAPES[shape].vocabulary,
            lengths=lengths,
            pairs=pairs,
        )

    def interleaved(
        self, names: Sequence[str], base: Path, data: Path, runs: int | None = None, **ask: Any
    ) -> dict[str, Rates]:
        """Run every contender once per round."""
        fields = json.dumps({"dtype": self.dtype, **ask})

        def command(name: str, out: Path) -> list[str]:
            words = [name, *map(str, (base, data, out)), fields]
            return [sys.executable, "-m", "benchmarks.contenders.training", *words]

        commands = {name: partial(command, name) for name in names}
        costs = in_turns(commands, runs or self.runs, self.root)
        return {name: Rates(of_one) for name, of_one in costs.items()}


def sft_rows(bench: Bench) -> list[Row]:
    """Measure LoRA SFT beside TRL, a loop with padded batches, and a bare loop over our rows."""
    data = bench.data("sft", draw_conversation_lengths(STEPS * bench.rows), bench.shape)
    names = ("ours", "trl", "padded", "bare")
    ask = {"steps": STEPS, "rows": bench.rows}
    timed = bench.interleaved(names, bench.base(bench.shape), data, **ask)
    detail = {name: rates.as_json() for name, rates in timed.items()}
    what = f"SFT, LoRA, {bench.shape}, {bench.dtype}"
    over = timed["bare"].rate / timed["ours"].rate - 1
    return [
        _faster(f"{what}, vs TRL", timed["ours"], timed["trl"], 1.5, detail),
        _faster(f"{what}, vs padded batches", timed["ours"], timed["padded"], 1.3, {}),
        Row(
            f"{what}, our loop over the bare one", timed["ours"].text, timed["bare"].text,
            f"{over:+.1%}", "<= +3 %", over <= 0.03, {},
        ),
    ]  # fmt: skip


def smollm2_rows(bench: Bench) -> list[Row]:
    """Measure LoRA SFT of SmolLM2 on the demo's rows beside TRL: tuned, and at its defaults."""
    data = make_input(bench.root / "countries", "make_countries", count=STEPS * 2 * bench.rows)
    base = make_input(bench.root / "base-smollm2", "link_smollm2")
    ask = {"steps": STEPS, "rows": bench.rows, "nproc": 2}
    timed = bench.interleaved(("ours", "trl", "trl-defaults"), base, data, **ask)
    detail = {name: rates.as_json() for name, rates in timed.items()}
    what = f"SFT, LoRA, SmolLM2-135M, {bench.dtype}"
    return [
        _faster(f"{what}, vs TRL in the same batches", timed["ours"], timed["trl"], 1.3, detail),
        _faster(f"{what}, vs TRL's defaults", timed["ours"], timed["trl-defaults"], 2, {}),
    ]


def dpo_rows(bench: Bench) -> list[Row]:
    """Measure LoRA DPO beside TRL."""
    pairs = bench.rows // 2
    data = bench.data("dpo", draw_conversation_lengths(STEPS * pairs), bench.shape, pairs=True)
    ask = {"objective": "dpo", "steps": STEPS, "rows": pairs}
    timed = bench.interleaved(("ours", "trl"), bench.base(bench.shape), data, **ask)
    detail = {name: rates.as_json() for name, rates in timed.items()}
    what = f"DPO, LoRA, {bench.shape}, {bench.dtype}, vs TRL"
    return [_faster(what, timed["ours"], timed["trl"], 1.5, detail)]


def memory_rows(bench: Bench) -> list[Row]:
    """Measure peak memory with a vocabulary of 152,000 and 4,000 tokens in a batch."""
    data = bench.data("wide", [LOGITS_TOKENS] * 4, "wide")
    ask = {"steps": 1, "rows": 4, "checkpointing": True}
    timed = bench.interleaved(("ours", "trl"), bench.base("wide"), data, runs=1, **ask)
    ours, peer = timed["ours"].peak_mb, timed["trl"].peak_mb
    ratio = ours / peer
    what = f"SFT, LoRA, vocabulary 152 k, 4 k tokens, {bench.dtype}, peak memory"
    texts = [f"{peak:.0f} MB" for peak in (ours, peer)]
    detail = {name: {"peak_mb": rates.peak_mb} for name, rates in timed.items()}
    return [Row(what, *texts, f"{ratio:.2f}", "<= 0.5", ratio <= 0.5, detail)]


def start_rows(bench: Bench) -> list[Row]:
    """Measure the time from the start of the stage to the end of its first step, on two ranks."""
    data = bench.data("toy", [40] * 16, "tiny")
    ask = {"steps": 1, "nproc": 2, "rows": 4}
    reports = bench.interleaved(("ours",), bench.base("tiny"), data, **ask)["ours"].reports
    times = [report["first_step_s"] for report in reports]
    text = f"{median(times):.1f} s ({min(times):.1f}..{max(times):.1f})"
    detail = {"ours": {"first_step_s": times}}
    met = median(times) <= 10
    return [Row("start to first step, two ranks, toy", text, "-", "-", "<= 10 s", met, detail)]


def _faster(what: str, ours: Rates, peer: Rates, bar: float, detail: Mapping[str, object]) -> Row:
    ratio = ours.rate / peer.rate
    return Row(what, ours.text, peer.text, f"{ratio:.2f}", f">= {bar:g}", ratio >= bar, detail)


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "sft": sft_rows,
    "smollm2": smollm2_rows,
    "dpo": dpo_rows,
    "memory": memory_rows,
    "start": start_rows,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the selected rows; print the table and the JSON line."""
    parser = make_parser("training", __doc__, ROWS)
    parser.add_argument("--shape", default="100M", choices=list(SHAPES))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options = parse(parser, ROWS, arguments)
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        bench = Bench(Path(folder).resolve(), options.runs, options.shape, options.dtype)
        rows = [row for name in options.rows for row in ROWS[name](bench)]
    print(table(rows))
    machine = {"cores": len(os.sched_getaffinity(0)), "machine": platform.machine()}
    print(json.dumps({"bench": "training", **machine, "rows": [vars(row) for row in rows]}))


if __name__ == "__main__":
    main()
