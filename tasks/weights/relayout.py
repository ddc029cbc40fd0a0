"""Laying a checkpoint out anew: other shards, another dtype; and links where nothing changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights import bits
from tasks.weights.reader import Checkpoint, torch_dtype
from tasks.weights.writer import (
    CheckpointWriter,
    Spec,
    plan_shards,
    shard_names,
    write_index,
)


@dataclass(frozen=True)
class Layout:
    """Where every tensor goes.

    Attributes:
        shards: output file name -> its tensors.
        links: output file name -> input file that already is exactly that shard.
    """

    shards: Mapping[str, tuple[Spec, ...]]
    links: Mapping[str, str]

    @property
    def specs(self) -> list[Spec]:
        """All tensors, in output order."""
        return [spec for shard in self.shards.values() for spec in shard]

    def cast_keys(self, source: Checkpoint) -> list[str]:
        """Tensors whose dtype changes."""
        return [s.name for s in self.specs if source.tensors[s.name].dtype != s.dtype]


@dataclass(frozen=True)
class Relaid:
    """What was written.

    Attributes:
        sha256: of the tensors that were written; linked ones keep the input's.
        overflow: elements that became infinite or NaN in the new dtype, by tensor.
    """

    sha256: Mapping[str, str]
    overflow: Mapping[str, int]


def plan_layout(source: Checkpoint, dtype: str, max_bytes: int) -> Layout:
    """Plan shards of at most `max_bytes`, floats in `dtype` (a safetensors name).

    The input's own shards stay as they are when they are small enough and their dtype is right.
    """
    specs = [
        Spec(name, info.shape, dtype if bits.is_float(info.dtype) else info.dtype)
        for name, info in source.tensors.items()
    ]
    by_file: dict[str, list[Spec]] = {}
    for spec in specs:
        by_file.setdefault(source.files[spec.name], []).append(spec)
    fits = all(sum(s.nbytes for s in shard) <= max_bytes for shard in by_file.values())
    same = all(source.tensors[s.name].dtype == s.dtype for s in specs)
    planned = list(by_file.values()) if fits and same else plan_shards(specs, max_bytes)
    names = shard_names(len(planned))
    shards = {name: tuple(shard) for name, shard in zip(names, planned, strict=True)}
    links = {}
    for name, shard in shards.items():
        file = source.files[shard[0].name]
        if list(shard) == by_file[file] and all(
            source.tensors[s.name].dtype == s.dtype for s in shard
        ):
            links[name] = file
    return Layout(shards, links)


def write_layout(source: Checkpoint, layout: Layout, out: Path) -> Relaid:
    """Write the shards of `layout` into `out`, and their index.

    Raises:
        ArtifactError: the output cannot be written (full disk).
    """
    overflow: dict[str, int] = {}
    sha256: dict[str, str] = {}
    for name, shard in layout.shards.items():
        if name in layout.links:
            link_or_copy(source.root / layout.links[name], out / name)
        else:
            sha256.update(_write_shard(source, shard, out, name, overflow))
    if len(layout.shards) > 1:
        files = {s.name: name for name, shard in layout.shards.items() for s in shard}
        write_index(out, layout.specs, files)
    return Relaid(sha256, overflow)


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it where the file system cannot."""
    real = source.resolve()  # the link has to be to the file, not to a symbolic link
    try:
        os.link(real, target)
    except OSError:
        shutil.copyfile(real, target)


def _write_shard(
    source: Checkpoint, shard: Sequence[Spec], out: Path, name: str, overflow: dict[str, int]
) -> Mapping[str, str]:
    stem = name.removesuffix(".safetensors")
    with CheckpointWriter(out, shard, stem=stem) as writer:
        for spec in shard:
            raw = source.raw(spec.name)
            if source.tensors[spec.name].dtype != spec.dtype:
                raw = _cast(source, spec)
                bad = bits.nonfinite(raw, spec.dtype)
                if bad:
                    overflow[spec.name] = bad
            writer.append(spec.name, raw)
    return writer.written.sha256


def _cast(source: Checkpoint, spec: Spec) -> NDArray[np.uint8]:
    import torch

    tensor = source.torch(spec.name).to(torch_dtype(spec.dtype))
    raw: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.asarray(raw)
