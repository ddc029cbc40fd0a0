"""Convert a ZeRO-3 checkpoint of 4 ranks to a bf16 model, beside DeepSpeed's own scripts.

    python -m benchmarks.zero rows [--size 0.5] [--runs 3] [--root .cache/bench]

The checkpoint is written in DeepSpeed's layout without training, and without the optimizer's
moments, which no contender reads. Its embeddings are not tied, because `zero_to_fp32
--safe_serialization` of DeepSpeed 0.19.8 fails on tied ones ("Some tensors share memory").
Contenders: `zero_to_fp32` (fp32, twice the bytes), and `zero_to_torch`, which can write bf16.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.children import Series, run
from benchmarks.shapes import SIZES, model_config, model_shapes

if TYPE_CHECKING:
    from benchmarks.rounds import Bench

RANKS = 4
TAG = "global_step10"


def rows(bench: Bench, size: str = "0.5") -> list[dict[str, Any]]:
    """Measure time and memory, and return the fields of two `rounds.Row`s."""
    source = bench.root / f"zero3-{size}"
    if not source.exists():
        run([sys.executable, "-m", "benchmarks.zero", "make", str(source), size])
    script = {name: str(source / f"{name}.py") for name in ("zero_to_fp32", "zero_to_torch")}
    safe = ["--safe_serialization"]
    runs = bench.interleaved(
        {
            "ours": lambda out: _ours(source, out),
            "zero_to_fp32": lambda out: [
                sys.executable, script["zero_to_fp32"], str(source), str(out), *safe,
            ],
            "zero_to_torch": lambda out: [
                sys.executable, script["zero_to_torch"], str(source), str(out), *safe,
                "--dtype", "bfloat16",
            ],
        }
    )  # fmt: skip
    detail = {name: series.as_json() for name, series in runs.items()}
    ours, peer = runs["ours"], runs["zero_to_fp32"]
    what = f"ZeRO-3, {RANKS} ranks -> bf16 model, {size} B"
    time, memory = ours.seconds / peer.seconds, ours.peak_mb / peer.peak_mb
    return [
        {
            "what": f"{what}, time", "ours": _seconds(ours), "against": _seconds(peer),
            "ratio": f"{time:.2f}", "bar": "<= 0.33", "met": time <= 1 / 3, "detail": detail,
        },
        {
            "what": f"{what}, memory", "ours": f"{ours.peak_mb:.0f} MB",
            "against": f"{peer.peak_mb:.0f} MB", "ratio": f"{memory:.3f}", "bar": "<= 0.25",
            "met": memory <= 1 / 4, "detail": {},
        },
    ]  # fmt: skip


def _ours(source: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "benchmarks.zero", "convert", str(source), str(out)]


def _seconds(series: Series) -> str:
    return f"{series.seconds:.2f} s ({series.spread})"


def make(folder: Path, size: str) -> None:
    """Write a checkpoint as `engine.save_checkpoint` does under ZeRO-3."""
    import torch
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils import zero_to_fp32

    shapes = OrderedDict((n, torch.Size(shape)) for n, shape in model_shapes(SIZES[size]).items())
    root = folder / TAG
    root.mkdir(parents=True)
    (folder / "latest").write_text(TAG)
    (folder / "config.json").write_text(json.dumps(model_config(SIZES[size])))
    for script in ("zero_to_fp32.py", "zero_to_torch.py"):
        shutil.copy(Path(zero_to_fp32.__file__).with_name(script), folder)
    partition = sum(-(-prod(shape) // RANKS) for shape in shapes.values())
    state: dict[str, Any] = {
        "module": OrderedDict((name, torch.empty(0, dtype=torch.bfloat16)) for name in shapes),
        "buffer_names": [], "optimizer": None, "param_shapes": [shapes],
        "frozen_param_shapes": OrderedDict(), "frozen_param_fragments": OrderedDict(),
        "shared_params": {}, "lr_scheduler": None, "global_steps": 10, "dp_world_size": RANKS,
        "mp_world_size": 1, "ds_config": {}, "ds_version": "0.19.8",
    }  # fmt: skip
    for rank in range(RANKS):
        pool = torch.randn(1 << 22, generator=torch.Generator().manual_seed(rank)) * 0.02
        flat = pool.repeat(-(-partition // pool.numel()))[:partition].clone()
        optimizer = {
            "zero_stage": ZeroStageEnum.weights, "partition_count": RANKS, "overflow": False,
            "optimizer_state_dict": {"state": {}, "param_groups": []}, "fp32_flat_groups": [flat],
        }  # fmt: skip
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save(state, root / f"{name}_model_states.pt")
        states = {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}
        torch.save(states, root / f"bf16_{name}_optim_states.pt")


def convert(folder: Path, out: Path) -> None:
    """Convert the checkpoint our way: plan, validate and execute, as `deliver` does."""
    from tasks.delivery.plan.planning import prepare
    from tasks.delivery.plan.work import Request, Target
    from tasks.delivery.recognise import recognise
    from tasks.weights.execute.execute import execute
    from tasks.weights.execute.worker import perform

    target = Target("bfloat16", 5 * 10**9)
    work = prepare(Request(recognise(folder), None, target, None, None, perform))
    out.mkdir(parents=True)
    execute(work.model, work.opened, out)


def main() -> None:
    """Print the rows as one JSON line, or run one of the child processes."""
    parser = argparse.ArgumentParser(prog="benchmarks.zero", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("folder", type=Path)
    making.add_argument("size", choices=list(SIZES))
    converting = commands.add_parser("convert")
    converting.add_argument("folder", type=Path)
    converting.add_argument("out", type=Path)
    alone = commands.add_parser("rows")
    alone.add_argument("--size", default="0.5", choices=list(SIZES))
    alone.add_argument("--runs", type=int, default=3)
    alone.add_argument("--root", type=Path, default=Path(".cache/bench"))
    options = parser.parse_args()
    if options.command == "make":
        make(options.folder, options.size)
    elif options.command == "convert":
        convert(options.folder, options.out)
    else:
        from benchmarks.rounds import Bench

        options.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=options.root) as folder:
            bench = Bench(Path(folder).resolve(), options.runs, [options.size])
            print(json.dumps(rows(bench, options.size)))


if __name__ == "__main__":
    main()
