"""Layout of a checkpoint before it is written: shards, file names, headers, index, disk space.

Shapes are planned, so headers and all offsets are known first. Every tensor can then be written
straight to its final place, in any order, by any number of threads (`execute.py`).
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tasks.core.disk import SPACE_HINT
from tasks.core.errors import ArtifactError, ConfigError
from tasks.weights.files.dtypes import ITEM_BITS
from tasks.weights.files.reader import WEIGHTS, Header, read_header
from tasks.weights.files.tensors import Sources, tensor_of
from tasks.weights.plan import Op, Plan

_ALIGN = 8
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


class Planned(Protocol):
    """A tensor to be written: name, shape, dtype (safetensors name) and size in bytes."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def nbytes(self) -> int: ...


AnyPlanned = TypeVar("AnyPlanned", bound=Planned)


@dataclass(frozen=True)
class Spec:
    """A tensor to be written that no operation of a plan makes."""

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
    starts: Mapping[str, int]  # absolute offsets of the tensors by name
    size: int  # size of the whole file in bytes


@dataclass(frozen=True)
class OutFile:
    """One output file and the operations that fill it."""

    file: ShardFile
    ops: Sequence[Op]
    link: Path | None = None  # the input file with exactly these tensors, unchanged; else None


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


def lay_out(plan: Plan, sources: Sources, *, stem: str = WEIGHTS) -> list[OutFile]:
    """Return the output files of a plan, in order."""
    shards: list[Sequence[Op]]
    if plan.shards is not None:
        edges = accumulate(plan.shards, initial=0)
        shards = [plan.ops[low:high] for low, high in pairwise(edges)]
    else:
        shards = [*plan_shards(plan.ops, plan.max_shard_bytes)]
    names = shard_names(len(shards), stem)
    return [
        OutFile(shard_file(name, shard), shard, _same_file(shard, sources))
        for name, shard in zip(names, shards, strict=True)
    ]


def _same_file(ops: Sequence[Op], sources: Sources) -> Path | None:
    """Return the input file with exactly these tensors, unchanged and with known hashes."""
    paths: set[Path] = set()
    for op in ops:
        tensor = tensor_of(op.source, sources)
        extents = tensor.extents
        plain = op.kind == "copy" and op.name == op.key and op.start == 0 and len(extents) == 1
        if not plain or tensor.hash is None or extents[0].nbytes != op.nbytes:
            return None
        paths.add(extents[0].path)
    path = paths.pop() if len(paths) == 1 else None
    header = _header(path) if path is not None and path.suffix == ".safetensors" else None
    if header is None or {op.name: op.shape for op in ops} != {
        name: info.shape for name, info in header.tensors.items()
    }:
        return None
    return path


def _header(path: Path) -> Header | None:
    try:
        return read_header(path)
    except ArtifactError:
        return None  # not a safetensors file in spite of its name; its tensors are copied


def plan_shards(tensors: Sequence[AnyPlanned], max_bytes: int | None) -> list[list[AnyPlanned]]:
    """Split tensors into shards of at most `max_bytes` of tensor data, keeping their order.

    A tensor larger than the limit gets its own shard. None means one shard.
    """
    shards: list[list[AnyPlanned]] = [[]]
    filled = 0
    for tensor in tensors:
        if shards[-1] and max_bytes is not None and filled + tensor.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += tensor.nbytes
    return shards


def shard_names(count: int, stem: str = WEIGHTS) -> list[str]:
    """Return file names of shards as transformers and vLLM expect them."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def shard_file(name: str, tensors: Sequence[Planned]) -> ShardFile:
    """Return header and offsets of a file that contains the tensors."""
    # Wider dtypes first: with an 8-byte aligned start every tensor is then aligned to its dtype.
    ordered = sorted(tensors, key=lambda tensor: -ITEM_BITS[tensor.dtype])
    ends = list(accumulate((tensor.nbytes for tensor in ordered), initial=0))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor, places in zip(ordered, pairwise(ends), strict=True):
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": list(places),
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    start = 8 + len(text)
    starts = {tensor.name: start + at for tensor, at in zip(ordered, ends, strict=False)}
    return ShardFile(name, struct.pack("<Q", len(text)) + text, starts, start + ends[-1])


def write_index(root: Path, files: Sequence[OutFile], stem: str = WEIGHTS) -> None:
    """Write `<stem>.safetensors.index.json`; `stem` is "model" or "adapter_model"."""
    places = {op.name: each.file.name for each in files for op in each.ops}
    document = {
        "metadata": {"total_size": sum(op.nbytes for each in files for op in each.ops)},
        "weight_map": dict(sorted(places.items())),
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
