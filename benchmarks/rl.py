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

from benchmarks.asking import RUNS, asked, asking
from benchmarks.report import RL, document, table, write_docs
from benchmarks.rl_rounds import Bench, Timed
from benchmarks.rl_setting import HANDED_RANK, SIZES
from benchmarks.rounds import Row

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m")
"""vLLM beside a training rank looks for its peers, where there are none too."""


def job(module: str, name: str, out: Path, *launcher: str, **ask: Any) -> list[str]:
    """Command line of a contender."""
    asked = json.dumps({"out": str(out), **ask})
    return [sys.executable, "-m", *launcher, f"benchmarks.{module}", name, asked]


def rollout_rows(bench: Bench, *, gpu: bool = False) -> list[Row]:
    """Useful tokens per second: vLLM beside a training rank, as shipped, and transformers.

    On a GPU nothing of vLLM is replaced; there the peer is vLLM in a process of its own.
    """
    ask = {"size": bench.size, "base": bench.base(bench.size), "adapter": bench.adapter(bench.size)}
    place = "rl_rollout_jobs"
    vllm = "vLLM alone" if gpu else "vLLM as shipped"
    found = bench.interleaved(
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
    ours, what = found["ours"], f"useful rollout tokens, {bench.size}, bf16, LoRA"
    rows = []
    for name, bar in (("transformers", 2.5), (vllm, 0.9 if gpu else 1.0)):
        ratio = found[name].seconds / ours.seconds
        detail = {} if rows else _detail(found)
        rows.append(
            Row(f"{what}, vs {name}", ours.rate, found[name].rate,
                f"{ratio:.2f}", f">= {bar:g}", ratio >= bar, detail)
        )  # fmt: skip
    return rows


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
    base, data = bench.ending_base(bench.size), bench.prompts(bench.size)
    ask = {"dtype": bench.dtype, "base": base, "data": data}
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
    given = _asked(arguments)
    # torchrun would give a lone rank one thread; everyone gets all.
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    with tempfile.TemporaryDirectory(dir=given.root) as folder:
        bench = Bench(Path(folder).resolve(), given.runs, given.size, given.handed, given.dtype)
        rows = [row for name in given.rows for row in ROWS[name](bench)]
    found = document(rows, given.runs, bench="rl")
    print(table(rows))
    print(json.dumps(found))
    usual = given.size == "110M" and given.handed == "1.5B" and given.dtype == "float32"
    if usual and given.rows == list(ROWS) and given.runs >= RUNS:
        write_docs(given.docs, rows, found, RL)
    else:
        print(f"{given.docs} is left as it is: not every row, the usual sizes and {RUNS} runs")


def _asked(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = asking("rl", __doc__, ROWS)
    parser.add_argument("--size", default="110M", choices=list(SIZES), help="rollout, iteration")
    parser.add_argument("--handed", default="1.5B", choices=list(SIZES), help="handoff")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"],
                        help="iteration; the others are bf16")  # fmt: skip
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="for a whole run's result")
    return asked(parser, ROWS, arguments)


if __name__ == "__main__":
    main()
