"""Partitions of the trained tensors: each rank writes its own.

Writing gathers nothing. Under ZeRO-3 a rank writes the partition that DeepSpeed gave it
(`ds_tensor`, without padding). Below stage 3 every rank has a full replica and writes an equal part
of it. Together the ranks write every element exactly once.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import nn

SHARDS = "shards"
PARTITIONS = "partitions.json"
"""Folder of all ranks' files in an artifact, and the index of the trained tensors beside it."""
SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


class Partition(NamedTuple):
    """A partition: elements [start, end) of a flattened parameter whose full shape is `shape`."""

    data: torch.Tensor
    shape: tuple[int, ...]
    start: int
    end: int


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def full_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of the full parameter, partitioned by ZeRO-3 or not."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def own_partitions(model: nn.Module, *, rank: int, world_size: int) -> dict[str, Partition]:
    """Return copies in host memory of this rank's partitions, empty ones left out."""
    partitions = {}
    for name, parameter in trainable(model).items():
        shape = full_shape(parameter)
        count = int(torch.Size(shape).numel())
        own = getattr(parameter, "ds_tensor", None)  # under ZeRO-3
        size = -(-count // world_size) if own is None else own.numel()
        start, end = min(rank * size, count), min((rank + 1) * size, count)
        data = parameter.detach().reshape(-1)[start:end]
        if own is not None:
            data = own.detach().reshape(-1)[: end - start]
        if end > start:
            partitions[name] = Partition(data.cpu().contiguous().clone(), shape, start, end)
    return partitions


def not_finite(partitions: dict[str, Partition]) -> list[str]:
    """Return the names of parameters whose partition on this rank holds NaN or infinity."""
    return [name for name, part in partitions.items() if not torch.isfinite(part.data).all()]


def write_partitions(
    partitions: dict[str, Partition], folder: Path, *, rank: int, world_size: int
) -> None:
    """Write one rank's file, with shape and range of each partition in its metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    ranges = {
        n: {"shape": list(p.shape), "start": p.start, "end": p.end} for n, p in partitions.items()
    }
    path = folder / f"rank-{rank:05d}-of-{world_size:05d}.safetensors"
    tensors = {name: part.data for name, part in partitions.items()}
    save_file(tensors, path, metadata={"partitions": json.dumps(ranges, sort_keys=True)})


def whole(
    parameters: Sequence[nn.Parameter], *, writer: int | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Gather parameters that ZeRO-3 may have partitioned; changes to them are lost.

    All ranks enter and leave the context together. Below ZeRO-3 it does nothing. With a `writer`
    changes stay, and every rank has to make the same ones.
    """
    if not any(hasattr(parameter, "ds_id") for parameter in parameters):
        return contextlib.nullcontext()
    import deepspeed

    context: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(
        list(parameters), modifier_rank=writer
    )
    return context
