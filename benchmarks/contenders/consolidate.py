"""Rank-0 consolidation, as OpenRLHF saves a PEFT model under ZeRO-3, simulated with gloo.

OpenRLHF gathers every parameter of the model, frozen ones too, into the state dict of rank 0. Then
it selects and saves the tensors of the adapter. Here each of two ranks reads its half of every
flattened parameter from files instead of memory, and there is no network between them.

    python -m benchmarks.contenders.consolidate BASE ADAPTER OUT
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WORLD = 2


def main(base: Path, adapter: Path, out: Path) -> None:
    """Start the ranks and wait for them."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as meeting:
        command = [
            sys.executable,
            "-m",
            "benchmarks.contenders.consolidate",
            *map(str, (base, adapter, out)),
        ]
        ranks = [
            subprocess.Popen(
                command, env={**os.environ, "RANK": str(rank), "MEETING": f"{meeting}/store"}
            )
            for rank in range(WORLD)
        ]
        ended = [rank.wait() for rank in ranks]
        if any(ended):
            sys.exit("a rank failed")


def rank_main(rank: int, base: Path, adapter: Path, out: Path) -> None:
    """Run one rank: gather all parameters, keep them on rank 0, and save the adapter there."""
    import torch
    import torch.distributed as dist
    from safetensors import safe_open
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['MEETING']}", rank=rank, world_size=WORLD
    )
    state: dict[str, Any] = {}
    moved = 0
    for path in (*sorted(base.glob("*.safetensors")), adapter / "adapter_model.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                flat = tensor.reshape(-1)
                size = -(-flat.numel() // WORLD)
                mine = torch.zeros(size, dtype=flat.dtype)
                part = flat[rank * size : (rank + 1) * size]
                mine[: part.numel()] = part
                whole = torch.empty(size * WORLD, dtype=flat.dtype)
                dist.all_gather_into_tensor(whole, mine)
                moved += whole.nbytes
                if rank == 0:
                    state[name] = whole[: flat.numel()].reshape(tensor.shape).clone()
    if rank == 0:
        kept = {name: tensor for name, tensor in state.items() if "lora_" in name}
        save_file(kept, out / "adapter_model.safetensors")
        print(json.dumps({"read": moved, "written": sum(t.nbytes for t in kept.values())}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:4]]
    if "RANK" in os.environ:
        rank_main(int(os.environ["RANK"]), *folders)
    else:
        main(*folders)
