"""Checkpoints in DeepSpeed's layout of ZeRO-3, written by torch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def write(root: Path, tensors: dict[str, torch.Tensor], world: int) -> None:
    """Write tensors of one parameter group: each rank has an equal, padded share of each."""
    (root / "global_step1").mkdir(parents=True)
    state: dict[str, Any] = {
        "module": {name: torch.empty(0) for name in tensors},
        "buffer_names": [],
        "param_shapes": [{name: tensor.shape for name, tensor in tensors.items()}],
        "shared_params": {},
        "global_steps": 1,
        "dp_world_size": world,
    }
    shares: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for tensor in tensors.values():
        padded = torch.nn.functional.pad(tensor.reshape(-1), (0, -tensor.numel() % world))
        for share, own in zip(shares, padded.chunk(world), strict=True):
            share.append(own)
    for rank, share in enumerate(shares):
        name = root / "global_step1" / f"zero_pp_rank_{rank}_mp_rank_00"
        optim = {"zero_stage": 3, "partition_count": world, "fp32_flat_groups": [torch.cat(share)]}
        torch.save({"optimizer_state_dict": optim}, f"{name}_optim_states.pt")
        torch.save(state, f"{name}_model_states.pt")
