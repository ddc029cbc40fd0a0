"""`make bench-rl`: rollouts, hand-offs and whole iterations of online learning beside their peers.

    make bench-rl ARGS='rollout iteration --runs 3'

Models are made on the spot. Contenders take turns in every round, each in a process of its own,
with the same model, adapter, prompts, lengths, number format and threads; what is timed begins
after a warm-up within the process. A run of every row at full size also goes into `docs/`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import RL, document, table, write_docs
from benchmarks.rl_rounds import Bench, Timed
from benchmarks.rl_setting import HANDED_RANK, SIZES
from benchmarks.rounds import Row

RUNS = 3
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m")
"""vLLM beside a training rank looks for its peers, where there are none too."""


def job(module: str, name: str, out: Path, *launcher: str, **ask: Any) -> list[str]:
    """Command line of a contender."""
    asked = json.dumps({"out": str(out), **ask})
    return [sys.executable, "-m", *launcher, f"benchmarks.{module}", name, asked]


def rollout_rows(bench: Bench) -> list[Row]:
    """Useful tokens a second: replies of many lengths, beside one padded batch."""
    ask = {"size": bench.size, "base": bench.base(bench.size), "adapter": bench.adapter(bench.size)}
    place = "rl_rollout_jobs"
    found = bench.interleaved(
        {
            "ours": lambda out: job(place, "rollout", out, *TORCHRUN, **ask),
            "transformers": lambda out: job(place, "transformers", out, **ask),
        }
    )
    ours, peer = found["ours"], found["transformers"]
    ratio = peer.seconds / ours.seconds
    what = f"useful rollout tokens, {bench.size}, bf16, 64 prompts, 16 to 128 tokens, LoRA"
    met = ratio >= 4.5
    return [Row(what, ours.rate, peer.rate, f"{ratio:.2f}", ">= 4.5", met, _detail(found))]


def handoff_rows(bench: Bench) -> list[Row]:
    """The policy into the engine: its adapter, beside merged weights."""
    ask = {"size": bench.handed, "base": bench.base(bench.handed)}
    place = "rl_rollout_jobs"
    found = bench.interleaved(
        {
            "ours": lambda out: job(place, "adapter", out, *TORCHRUN, **ask),
            "merged weights": lambda out: job(place, "weights", out, *TORCHRUN, **ask),
        }
    )
    ours, peer = found["ours"], found["merged weights"]
    ratio = ours.seconds / peer.seconds
    what = f"policy hand-off, rank {HANDED_RANK}, {bench.handed}, bf16, vs merged weights"
    met = ratio <= 0.1
    return [Row(what, ours.text, peer.text, f"{ratio:.3f}", "<= 0.1", met, _detail(found))]


def iteration_rows(bench: Bench) -> list[Row]:
    """One iteration of GRPO beside TRL's, and how much of ours is none of the work."""
    ask = {"dtype": bench.dtype, "base": bench.base(bench.size), "data": bench.prompts(bench.size)}
    found = bench.interleaved({name: _loop(name, **ask) for name in ("ours", "trl")})
    ours, peer = found["ours"], found["trl"]
    ratio = peer.seconds / ours.seconds
    shares = [share for one in ours.told for share in one["overhead"]]
    share = median(shares)
    what = f"GRPO, LoRA, {bench.size}, {bench.dtype}"
    text = f"{share:.1%} ({min(shares):.1%}..{max(shares):.1%})"
    return [
        Row(
            f"{what}, an iteration, vs TRL", ours.text, peer.text,
            f"{ratio:.2f}", ">= 2", ratio >= 2, _detail(found),
        ),
        Row(
            f"{what}, outside of generate, score, measure, update", text, "the iteration",
            f"{share:.3f}", "<= 5 %", share <= 0.05, {},
        ),
    ]  # fmt: skip


def _loop(name: str, **ask: Any) -> Callable[[Path], list[str]]:
    return lambda out: job("rl_loop_jobs", name, out, **ask)


def _detail(found: Mapping[str, Timed]) -> dict[str, object]:
    return {name: timed.as_json() for name, timed in found.items()}


ROWS: dict[str, Callable[[Bench], list[Row]]] = {
    "rollout": rollout_rows,
    "handoff": handoff_rows,
    "iteration": iteration_rows,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the asked rows; print the table and the JSON line."""
    asked = _asked(arguments)
    # torchrun would give a lone rank one thread; everyone gets all.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    asked.root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.root) as folder:
        bench = Bench(Path(folder).resolve(), asked.runs, asked.size, asked.handed, asked.dtype)
        rows = [row for name in asked.rows for row in ROWS[name](bench)]
    found = document(rows, asked.runs, bench="rl")
    print(table(rows))
    print(json.dumps(found))
    usual = asked.size == "110M" and asked.handed == "1.5B" and asked.dtype == "float32"
    if usual and asked.rows == list(ROWS) and asked.runs >= RUNS:
        write_docs(asked.docs, rows, found, RL)
    else:
        print(f"{asked.docs} is left as it is: not every row, the usual sizes and {RUNS} runs")


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench-rl", description=__doc__)
    parser.add_argument("rows", nargs="*", help=f"of {', '.join(ROWS)}; all when none is named")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--size", default="110M", choices=list(SIZES), help="rollout, iteration")
    parser.add_argument("--handed", default="1.5B", choices=list(SIZES), help="handoff")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"],
                        help="iteration; the others are bf16")  # fmt: skip
    parser.add_argument("--root", type=Path, default=Path(".cache/bench"), help="for the models")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="for a whole run's result")
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.rows) - set(ROWS))
    if unknown:
        parser.error(f"no row {unknown[0]}; there are {', '.join(ROWS)}")
    asked.rows = asked.rows or list(ROWS)
    return asked


if __name__ == "__main__":
    main()
