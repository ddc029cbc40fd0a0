"""Checkpoints in DeepSpeed's layout, written by torch alone."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

Tensors = dict[str, torch.Tensor]
Groups = list[Tensors]


def cut_by_group(groups: Groups, world: int, align: int) -> tuple[list[Any], list[Any]]:
    """Partition like ZeRO-2: return each rank's part of each flattened group, and paddings."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(world)]
    paddings = []
    for group in groups:
        pieces, pads, at = [], [], 0
        for index, tensor in enumerate(group.values()):
            at += tensor.numel()
            pads.append(0 if index == len(group) - 1 else -at % align)
            at += pads[-1]
            pieces += [tensor.reshape(-1), torch.full((pads[-1],), torch.nan)]
        padding = -at % (2 * world)
        flat = torch.cat([*pieces, torch.full((padding,), torch.nan)])
        share = flat.numel() // world
        for rank in range(world):
            # The last rank does not save the group's padding, as far as its part has that much.
            end = (rank + 1) * share - (padding if rank == world - 1 else 0)
            parts[rank].append(flat[rank * share : max(rank * share, end)].clone())
        paddings.append(pads)
    return parts, paddings


def cut_by_parameter(groups: Groups, world: int) -> list[Any]:
    """Partition like ZeRO-3: return each rank's equal, padded share of each parameter."""
    parts: list[list[torch.Tensor]] = [[] for _ in range(world)]
    for group in groups:
        shares: list[list[torch.Tensor]] = [[] for _ in range(world)]
        for tensor in group.values():
            share = -(-tensor.numel() // world)
            padded = torch.full((share * world,), torch.nan)
            padded[: tensor.numel()] = tensor.reshape(-1)
            for rank in range(world):
                shares[rank].append(padded[rank * share : (rank + 1) * share])
        for rank in range(world):
            parts[rank].append(torch.cat(shares[rank]))
    return parts


def write(root: Path, groups: Groups, stage: int, world: int, align: int) -> None:
    """Write a checkpoint in DeepSpeed's layout."""
    shutil.rmtree(root, ignore_errors=True)
    (root / "global_step1").mkdir(parents=True)
    every = {name: tensor for group in groups for name, tensor in group.items()}
    state = {
        "module": {
            n: t.to(torch.bfloat16) if stage < 3 else torch.empty(0) for n, t in every.items()
        },
        "buffer_names": [],
        "param_shapes": [OrderedDict((n, t.shape) for n, t in group.items()) for group in groups],
        "shared_params": {},
        "global_steps": 1,
        "dp_world_size": world,
    }
    optim: dict[str, Any] = {"zero_stage": stage, "partition_count": world}
    if stage == 3:
        parts, key = cut_by_parameter(groups, world), "fp32_flat_groups"
    else:
        parts, paddings = cut_by_group(groups, world, align)
        key = "single_partition_of_fp32_groups"
        optim["param_alignment_paddings"] = paddings
    for rank in range(world):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        states = {"optimizer_state_dict": {**optim, key: parts[rank]}}
        torch.save(states, root / "global_step1" / f"{name}_optim_states.pt")
        if stage == 3 or rank == 0:
            model = name if stage == 3 else "mp_rank_00"
            torch.save(state, root / "global_step1" / f"{model}_model_states.pt")
