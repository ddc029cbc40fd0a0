"""What one rank owns of every trainable tensor, and the file it writes it to.

Nothing is gathered: under ZeRO-3 a rank owns what DeepSpeed gave it (`ds_tensor`, less its
padding); below stage 3 every rank has a whole replica and writes an equal share of it, so that
writing is parallel there too. Together the ranks cover every element exactly once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


@dataclass(frozen=True)
class Share:
    """Elements [start, end) of a flattened parameter whose full shape is `shape`."""

    data: torch.Tensor
    shape: tuple[int, ...]
    start: int
    end: int


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that are trained, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Shape of the whole parameter, partitioned by ZeRO-3 or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def share(parameter: nn.Parameter, *, rank: int, world_size: int) -> Share:
    """This rank's share of a parameter."""
    shape = full_shape(parameter)
    count = int(torch.Size(shape).numel())
    partition = getattr(parameter, "ds_tensor", None)
    size = -(-count // world_size) if partition is None else partition.numel()
    start, end = min(rank * size, count), min((rank + 1) * size, count)
    if partition is None:
        data = parameter.detach().reshape(-1)[start:end]
    else:
        data = partition.detach().reshape(-1)[: end - start]
    return Share(data.cpu().contiguous().clone(), shape, start, end)


def own_shares(model: nn.Module, *, rank: int, world_size: int) -> dict[str, Share]:
    """This rank's share of every trainable parameter; shares without an element are left out."""
    found = {
        name: share(parameter, rank=rank, world_size=world_size)
        for name, parameter in trainable(model).items()
    }
    return {name: one for name, one in found.items() if one.end > one.start}


def not_finite(shares: dict[str, Share]) -> list[str]:
    """Names of parameters of which this rank's share holds NaN or infinity."""
    return [name for name, one in shares.items() if not torch.isfinite(one.data).all()]


def shard_name(rank: int, world_size: int) -> str:
    """File name of a rank's shares."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def write_shares(shares: dict[str, Share], folder: Path, *, rank: int, world_size: int) -> Path:
    """Write one rank's file; where each share belongs is in its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    where = {
        name: {"shape": list(one.shape), "start": one.start, "end": one.end}
        for name, one in shares.items()
    }
    path = folder / shard_name(rank, world_size)
    tensors = {name: one.data for name, one in shares.items()}
    save_file(tensors, path, metadata={"partitions": json.dumps(where, sort_keys=True)})
    return path


def describe(model: nn.Module, *, world_size: int, zero_stage: int, mode: str) -> dict[str, Any]:
    """The contents of `partitions.json`: which parameters exist, at which shapes."""
    parameters = trainable(model)
    dtypes = {SAFETENSORS_DTYPES[p.dtype] for p in parameters.values()}
    return {
        "format": 1,
        "world_size": world_size,
        "zero_stage": zero_stage,
        "mode": mode,
        "dtype": ",".join(sorted(dtypes)),
        "parameters": {name: {"shape": list(full_shape(p))} for name, p in parameters.items()},
    }
