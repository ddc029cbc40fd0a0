"""Layout of a checkpoint before it is written: shards, file names, headers, index, disk space.

Shapes are planned, so headers and all offsets are known first. Every tensor can then be written
straight to its final place, in any order, by any number of threads (`execute.py`).
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tasks.core.disk import SPACE_HINT
from tasks.core.errors import ArtifactError, ConfigError
from tasks.weights.files.dtypes import ITEM_BITS
from tasks.weights.files.header import TensorInfo
from tasks.weights.files.reader import WEIGHTS

_ALIGN = 8
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True)
class Spec:
    """Name, shape and dtype (safetensors name) of a tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True)
class ShardFile:
    """Layout of one output file."""

    name: str
    head: bytes  # length prefix and JSON header, padded so that tensors are aligned
    infos: Mapping[str, TensorInfo]  # absolute offsets of the tensors by name
    size: int  # size of the whole file in bytes


def parse_size(text: str | int) -> int:
    """Parse a size in bytes: "5GB" -> 5_000_000_000. Also B, KB, MB, KiB, MiB, GiB, plain numbers.

    Raises:
        ConfigError: not a size, or 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", str(text).upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size <= 0:
        raise ConfigError(
            f"convert.max_shard_size={text!r} is not a size",
            hint="write it like convert.max_shard_size=5GB (B, KB, MB, GB, KiB, MiB, GiB)",
        )
    return size


def plan_shards(specs: Sequence[Spec], max_bytes: int | None) -> list[list[Spec]]:
    """Split tensors into shards of at most `max_bytes` of tensor data, keeping their order.

    A tensor larger than the limit gets its own shard. None means one shard.
    """
    shards: list[list[Spec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and max_bytes is not None and filled + spec.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def shard_names(count: int, stem: str = WEIGHTS) -> list[str]:
    """Return file names of shards as transformers and vLLM expect them."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def shard_file(name: str, specs: Sequence[Spec]) -> ShardFile:
    """Return header and offsets of a file that contains the tensors `specs`."""
    # Wider dtypes first: with an 8-byte aligned start every tensor is then aligned to its dtype.
    ordered = sorted(specs, key=lambda spec: -ITEM_BITS[spec.dtype])
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in ordered:
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [at, at + spec.nbytes],
        }
        at += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    start = 8 + len(text)
    infos = {}
    for spec in ordered:
        first, last = entries[spec.name]["data_offsets"]
        infos[spec.name] = TensorInfo(spec.shape, spec.dtype, start + first, start + last)
    return ShardFile(name, struct.pack("<Q", len(text)) + text, infos, start + at)


def write_index(
    root: Path, specs: Iterable[Spec], files: Mapping[str, str], stem: str = WEIGHTS
) -> None:
    """Write `<stem>.safetensors.index.json`.

    Args:
        specs: all tensors; their sizes add up to `total_size`, in bytes of tensor data.
        stem: start of the file names: "model" or "adapter_model".
    """
    document = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
        "weight_map": dict(sorted(files.items())),
    }
    path = root / f"{stem}.safetensors.index.json"
    path.write_text(json.dumps(document, indent=2) + "\n")


def require_space(root: Path, nbytes: int) -> None:
    """Raise ArtifactError if the disk has less than `nbytes` free."""
    free = shutil.disk_usage(root).free
    if free < nbytes:
        raise ArtifactError(
            f"{root}: {nbytes / 1e9:.2f} GB will be written, {free / 1e9:.2f} GB are free",
            hint=SPACE_HINT,
        )
