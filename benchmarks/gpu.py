"""`make bench-gpu`: training, rollouts, weight sync and merge on one GPU, beside other tools.

    make bench-gpu ARGS='sft rollout --runs 3'

The rows are those of the other benchmarks, at 1.5 B in bf16. A row that fails is reported as not
measured, with the reason, and the others run. The results go into `docs/benchmarks.md`.
`--tiny` runs the same code on a CPU to test it, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import rl, training, weights
from benchmarks.harness import make_parser, parse
from benchmarks.report import Page, Row, document, table, write_docs

ROWS_OF_A_BATCH = 32
PAGE = Page(
    "<!-- what make bench-gpu printed -->",
    "medians of {runs} interleaved runs (fastest..slowest).",
)
NO_GPU = "no GPU was available"


@dataclass(frozen=True)
class Benches:
    """The other benchmarks, at the sizes of this one."""

    training: training.Bench
    rl: rl.Bench
    weights: weights.Bench

    @classmethod
    def of(cls, root: Path, runs: int, *, tiny: bool) -> Benches:
        """Make all of them, each in its own folder, because they use the same names for models."""
        places = [root / name for name in ("training", "rl", "weights")]
        for place in places:
            place.mkdir()
        large, dtype = ("tiny", "float32") if tiny else ("1.5B", "bfloat16")
        batch = 4 if tiny else ROWS_OF_A_BATCH
        return cls(
            training.Bench(places[0], runs, large, dtype, batch),
            rl.Bench(places[1], runs, large, large, dtype),
            weights.Bench(places[2], runs, ["tiny" if tiny else "1.5"]),
        )


ROWS: dict[str, Callable[[Benches], list[Row]]] = {
    "sft": lambda benches: training.sft_rows(benches.training),
    "dpo": lambda benches: training.dpo_rows(benches.training),
    "rollout": lambda benches: rl.rollout_rows(benches.rl, gpu=True),
    "handoff": lambda benches: rl.handoff_rows(benches.rl),
    "iteration": lambda benches: rl.iteration_rows(benches.rl),
    "merge": lambda benches: weights.ROWS["merge"](benches.weights),
}
"""Functions that measure a row, by name; their docstrings name the contenders."""
TITLES = {
    "sft": "SFT, LoRA, 1.5 B: tokens per second, beside TRL",
    "dpo": "DPO, LoRA, 1.5 B: tokens per second, beside TRL",
    "rollout": "rollouts, 1.5 B: useful tokens per second, beside vLLM alone and transformers",
    "handoff": "weight sync of an adapter, beside merged weights",
    "iteration": "an iteration of GRPO, 1.5 B, beside TRL",
    "merge": "merge of an adapter, 1.5 B, beside peft",
}


def measured(name: str, benches: Benches) -> list[Row]:
    """Return the lines of a row; if it fails, one line with the reason."""
    try:
        return ROWS[name](benches)
    except Exception as error:  # a failed row must not stop the others
        lines = [line.strip() for line in str(error).splitlines() if "Error: " in line]
        why = lines[0][:200] if lines else f"{type(error).__name__}: {str(error)[:200]}"
        print(f"{name}: {error}", file=sys.stderr)
        return [not_measured(name, why)]


def not_measured(name: str, why: str) -> Row:
    """Return the line of a row without numbers."""
    return Row(TITLES[name], f"not measured: {why}", "-", "-", "-", False, {})


def gpu_name() -> str | None:
    """Return name and CUDA version of the first GPU, from a child process; None without a GPU."""
    code = (
        "import torch; there = torch.cuda.is_available(); "
        "print(torch.cuda.get_device_name(0) if there else '', torch.version.cuda, sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    name, cuda = done.stdout.strip().splitlines()[-1].split("|")
    return f"{name}, CUDA {cuda}" if name else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the selected rows; print the table and the JSON line."""
    options = _options(arguments)
    name = "a CPU, tiny" if options.tiny else gpu_name()
    if name is None:
        lines = [not_measured(row, NO_GPU) for row in options.rows]
        print(f"{table(lines)}\n{options.docs} is left as it is: {NO_GPU}")
        return
    with tempfile.TemporaryDirectory(dir=options.root) as folder:
        benches = Benches.of(Path(folder).resolve(), options.runs, tiny=options.tiny)
        lines = [line for row in options.rows for line in measured(row, benches)]
    document_ = document(lines, options.runs, bench="gpu")
    document_["machine"] = f"{document_['machine']}, {name}"
    print(table(lines))
    print(json.dumps(document_))
    if options.rows == list(ROWS) and not options.tiny:
        write_docs(options.docs, lines, document_, PAGE)
    else:
        print(f"{options.docs} is left as it is: not every row on a GPU")


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("gpu", __doc__, ROWS)
    parser.add_argument("--tiny", action="store_true", help="tiny models on a CPU, to try it out")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="for a whole run's result")
    return parse(parser, ROWS, arguments)


if __name__ == "__main__":
    main()
