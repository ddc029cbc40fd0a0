"""`make bench-rl`: rollouts, weight sync and whole iterations of GRPO, beside other tools.

    make bench-rl ARGS='rollout iteration --runs 3'

Models are made for the run. Contenders take turns in every round, each in its own process, with the
same model, adapter, prompts, lengths, dtype and threads. Timing begins after a warm-up in the
process. A run of all rows at full size also goes into `docs/`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import RUNS, Commands, Results, in_turns, make_input, make_parser, parse
from benchmarks.inputs import ENDS, HANDED_RANK, SIZES
from benchmarks.report import RL, Row, document, table, write_docs

QUESTION_WORDS = 32
"""Words of a prompt in the row about iterations."""

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m")
"""Launcher of a single rank: vLLM in a training process needs torchrun's environment."""


@dataclass(frozen=True)
class Timed(Results):
    """Seconds that one contender reports."""

    @property
    def runs(self) -> list[float]:
        """Seconds of each round: the median of its timed parts."""
        return [median(report["seconds"]) for report in self.reports]

    @property
    def seconds(self) -> float:
        """Median of all rounds, seconds."""
        return median(self.runs)

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
        """Return the folder of a model in bf16 whose responses end at the token limit."""
        return self._made(f"base-{size}", "write_llama", size=SIZES[size], dtype="bfloat16")

    def ending_base(self, size: str) -> str:
        """Return the folder of a model in bf16 whose responses end with EOS at random."""
        return self._made(
            f"ending-base-{size}", "write_llama", size=SIZES[size], dtype="bfloat16", ends=ENDS
        )

    def adapter(self, size: str) -> str:
        """Return the folder of an adapter for the model."""
        return self._made(f"adapter-{size}", "make_adapter", base=self.base(size))

    def prompts(self, size: str) -> str:
        """Return the folder of a dataset of prompts."""
        words = {"vocabulary": SIZES[size].vocabulary, "count": 64, "length": QUESTION_WORDS}
        return self._made(f"prompts-{size}", "make_prompts", **words)

    def interleaved(self, commands: Commands) -> dict[str, Timed]:
        """Run every contender once per round."""
        costs = in_turns(commands, self.runs, self.root)
        return {name: Timed(runs) for name, runs in costs.items()}

    def _made(self, name: str, function: str, **arguments: Any) -> str:
        return str(make_input(self.root / name, function, **arguments))


def job(module: str, name: str, out: Path, *launcher: str, **ask: Any) -> list[str]:
    """Return the command line of a contender."""
    fields = json.dumps({"out": str(out), **ask})
    return [sys.executable, "-m", *launcher, f"benchmarks.contenders.{module}", name, fields]


def rollout_rows(bench: Bench, *, gpu: bool = False) -> list[Row]:
    """Measure useful tokens per second: vLLM in a training process, vLLM as shipped, transformers.

    On a GPU we replace nothing in vLLM, so the contender is vLLM in its own process.
    """
    ask = {"size": bench.size, "base": bench.base(bench.size), "adapter": bench.adapter(bench.size)}
    place = "rollouts"
    vllm = "vLLM alone" if gpu else "vLLM as shipped"
    timed = bench.interleaved(
        {
            "ours": lambda out: job(place, "rollout", out, *TORCHRUN, **ask),
            vllm: lambda out: (
                job(place, "vllm", out, **ask)
                if gpu
                else job(place, "shipped", out, *TORCHRUN, **ask)
            ),
            "transformers": lambda out: job(place, "transformers", out, **ask),
        }
    )
    ours, what = timed["ours"], f"useful rollout tokens, {bench.size}, bf16, LoRA"
    rows = []
    for name, bar in (("transformers", 2.5), (vllm, 0.9 if gpu else 1.0)):
        ratio = timed[name].seconds / ours.seconds
        detail = {} if rows else _detail(timed)
        rows.append(
            Row(f"{what}, vs {name}", ours.rate, timed[name].rate,
                f"{ratio:.2f}", f">= {bar:g}", ratio >= bar, detail)
        )  # fmt: skip
    return rows


def handoff_rows(bench: Bench) -> list[Row]:
    """Measure the weight sync to vLLM: an adapter, beside merged weights."""
    ask = {"size": bench.handed, "base": bench.base(bench.handed)}
    place = "rollouts"
    timed = bench.interleaved(
        {
            "ours": lambda out: job(place, "adapter", out, *TORCHRUN, **ask),
            "merged weights": lambda out: job(place, "weights", out, *TORCHRUN, **ask),
        }
    )
    ours, peer = timed["ours"], timed["merged weights"]
    ratio = ours.seconds / peer.seconds
    what = f"policy hand-off, rank {HANDED_RANK}, {bench.handed}, bf16, vs merged weights"
    met = ratio <= 0.1
    return [Row(what, ours.text, peer.text, f"{ratio:.3f}", "<= 0.1", met, _detail(timed))]


def iteration_rows(bench: Bench) -> list[Row]:
    """Measure an iteration of GRPO beside TRL's, and the share of ours that is overhead."""
    base, data = bench.ending_base(bench.size), bench.prompts(bench.size)
    ask = {"dtype": bench.dtype, "base": base, "data": data}
    timed = bench.interleaved({name: _loop(name, **ask) for name in ("ours", "trl")})
    ours, peer = timed["ours"], timed["trl"]
    ratio = peer.seconds / ours.seconds
    shares = [share for report in ours.reports for share in report["overhead"]]
    share = median(shares)
    what = f"GRPO, LoRA, {bench.size}, {bench.dtype}"
    text = f"{share:.1%} ({min(shares):.1%}..{max(shares):.1%})"
    return [
        Row(
            f"{what}, an iteration, vs TRL", ours.text, peer.text,
            f"{ratio:.2f}", ">= 2", ratio >= 2, _detail(timed),
        ),
        Row(
            f"{what}, outside of generate, score, measure, update", text, "the iteration",
            f"{share:.3f}", "<= 5 %", share <= 0.05, {},
        ),
    ]  # fmt: skip


def staleness_rows(bench: Bench) -> list[Row]:
    """Measure an iteration whose responses a server sampled beside the update before it.

    Rank and server have a thread each, so that the machine needs two free cores.
    """
    base, data = bench.ending_base(bench.size), bench.prompts(bench.size)
    ask = {"dtype": bench.dtype, "base": base, "data": data, "engine": "server", "timed": 2}
    timed = bench.interleaved(
        {
            "one step off policy": _loop("ours", **ask, staleness=1),
            "in turns": _loop("ours", **ask),
        }
    )
    ours, peer = timed["one step off policy"], timed["in turns"]
    ratio = ours.seconds / peer.seconds
    what = f"GRPO through a server, LoRA, {bench.size}, {bench.dtype}, rl.staleness=1, vs 0"
    met = ratio <= 0.8
    return [Row(what, ours.text, peer.text, f"{ratio:.2f}", "<= 0.8", met, _detail(timed))]


def _loop(name: str, **ask: Any) -> Callable[[Path], list[str]]:
    return lambda out: job("grpo", name, out, **ask)


def _detail(timed: Mapping[str, Timed]) -> dict[str, object]:
    return {name: runs.as_json() for name, runs in timed.items()}


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "rollout": rollout_rows,
    "handoff": handoff_rows,
    "iteration": iteration_rows,
    "staleness": staleness_rows,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the selected rows; print the table and the JSON line."""
    options = _options(arguments)
    # torchrun gives a single rank one thread; all contenders get all threads.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        bench = Bench(
            Path(folder).resolve(), options.runs, options.size, options.handed, options.dtype
        )
        rows = [row for name in options.rows for row in ROWS[name](bench)]
    results = document(rows, options.runs, bench="rl")
    print(table(rows))
    print(json.dumps(results))
    usual = options.size == "110M" and options.handed == "1.5B" and options.dtype == "float32"
    if usual and options.rows == list(ROWS) and options.runs >= RUNS:
        write_docs(options.docs, rows, results, RL)
    else:
        print(f"{options.docs} is left as it is: not every row, the usual sizes and {RUNS} runs")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("rl", __doc__, ROWS)
    parser.add_argument("--size", default="110M", choices=list(SIZES), help="all but handoff")
    parser.add_argument("--handed", default="1.5B", choices=list(SIZES), help="handoff")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"],
                        help="iteration, staleness; the others are bf16")  # fmt: skip
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="for a whole run's result")
    return parse(parser, ROWS, arguments)


if __name__ == "__main__":
    main()
