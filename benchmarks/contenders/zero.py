"""Make a ZeRO-3 checkpoint of 4 ranks, and convert it to a bf16 model our way.

    python -m benchmarks.contenders.zero make FOLDER 0.5
    python -m benchmarks.contenders.zero convert FOLDER OUT

The checkpoint is written in DeepSpeed's layout without training, and without the optimizer's
moments, which no contender reads. Its embeddings are not tied, because `zero_to_fp32
--safe_serialization` of DeepSpeed 0.19.8 fails on tied ones ("Some tensors share memory").
"""

from __future__ import annotations

import json
import shutil
import sys
from collections import OrderedDict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.shapes import SIZES, model_config, model_shapes

if TYPE_CHECKING:
    pass

RANKS = 4
TAG = "global_step10"


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
    from tasks.delivery.plan import Request, prepare
    from tasks.delivery.source import recognise
    from tasks.delivery.tokens import Tokens

    source, tokens = recognise(folder), Tokens(folder, None)
    how = {"dtype": "bfloat16", "max_shard_bytes": 5 * 10**9}
    work = prepare(Request(source=source, base=None, tokens=tokens, **how))
    out.mkdir(parents=True)
    from tasks.weights.write import write

    write(work.plan, work.sources, out)


if __name__ == "__main__":
    job, source, *rest = sys.argv[1:]
    make(Path(source), rest[0]) if job == "make" else convert(Path(source), Path(rest[0]))
