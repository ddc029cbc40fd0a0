"""Make models and adapters of any size, with the shapes of Qwen2.5 and random numbers.

    python -m benchmarks.synthetic base FOLDER 1.5

A pool of random numbers is repeated at shifting offsets, because the values do not affect the cost
of copying and arithmetic. Memory holds one tensor at a time.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from benchmarks.shapes import (
    HUGE,
    SIZES,
    Size,
    adapter_config,
    adapter_shapes,
    model_config,
    model_shapes,
)
from tasks.weights.plan import Op
from tasks.weights.write import plan_shards, shard_names

_POOL = 1 << 24
SHARD = 5 * 10**9
"""Maximum bytes of tensors in a file, the default of `convert.max_shard_size`."""


def make_model(folder: Path, size: Size, *, seed: int = 0) -> None:
    """Write a base in bf16 like `save_pretrained`, with the manifest of an artifact."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(model_config(size), indent=1))
    shapes = model_shapes(size)
    shards = plan_shards(
        [Op(name, shape, "BF16", "", "BF16") for name, shape in shapes.items()], SHARD
    )
    draw = _drawing(seed, 0.02)
    tensors: dict[str, dict[str, object]] = {}
    for file, shard in zip(shard_names(len(shards)), shards, strict=True):
        shapes_in_file = {spec.name: spec.shape for spec in shard}
        hashes = write_safetensors(folder / file, shapes_in_file, "BF16", draw)
        tensors[file] = {
            name: {"shape": list(shape), "dtype": "BF16", "blake3": hashes[name]}
            for name, shape in shapes_in_file.items()
        }
    if len(shards) > 1:
        _write_index(folder, {name: file for file, names in tensors.items() for name in names})
    _manifest(folder, "base", tensors)


def _write_index(folder: Path, files: Mapping[str, str]) -> None:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": dict(files)}))


def make_adapter(folder: Path, size: Size, *, seed: int = 1) -> None:
    """Write a PEFT adapter of rank 64 on every linear layer."""
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(size), indent=1))
    path = folder / "adapter_model.safetensors"
    write_safetensors(path, adapter_shapes(size), "BF16", _drawing(seed, 0.02))


Draw = Callable[[int], Iterator[NDArray[np.uint16]]]
"""Takes a count, and yields that many random numbers in pieces."""


def header(
    shapes: Mapping[str, tuple[int, ...]], dtype: str, metadata: dict[str, str]
) -> tuple[bytes, int]:
    """Return the header of a file of 16-bit tensors, and the number of bytes after it."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    for name, shape in shapes.items():
        nbytes = 2 * prod(shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, at


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    draw: Draw,
    metadata: dict[str, str] | None = None,
) -> dict[str, str]:
    """Write a file of 16-bit tensors piece by piece, and return the BLAKE3 hash of each tensor."""
    hashes = {}
    with path.open("wb") as file:
        file.write(header(shapes, dtype, metadata or {})[0])
        for name, shape in shapes.items():
            digest = blake3()
            for piece in draw(prod(shape)):
                file.write(piece.data)
                digest.update(piece.view(np.uint8))
            hashes[name] = digest.hexdigest()
    return hashes


def _drawing(seed: int, deviation: float) -> Draw:
    """Return a function that yields normally distributed bf16 numbers from one pool."""
    random = np.random.default_rng(seed)
    wide = random.normal(0.0, deviation, _POOL).astype(np.float32)
    pool = (wide.view(np.uint32) >> 16).astype(np.uint16)
    state = {"at": 0}

    def draw(count: int) -> Iterator[NDArray[np.uint16]]:
        while count:
            state["at"] = (state["at"] * 5 + 12_345) % (_POOL // 2)
            piece = pool[state["at"] : state["at"] + min(count, _POOL // 2)]
            count -= len(piece)
            yield piece

    return draw


def _manifest(folder: Path, kind: str, tensors: Mapping[str, Mapping[str, object]]) -> None:
    """Write a manifest in the format of `tasks.pipeline.artifact`."""
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"size": path.stat().st_size, "blake3": "not taken here"}
    document = {
        "format": 1, "kind": kind, "digest": kind, "tensors": tensors, "files": files,
        "inputs": {}, "notes": {},
    }  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(document))


def make_shards(folder: Path, size: Size, *, world: int = 2) -> None:
    """Write the partitions of an adapter as `world` ranks leave them after training."""
    (folder / "shards").mkdir(parents=True)
    live = {
        name.replace(".weight", ".default.weight"): shape
        for name, shape in adapter_shapes(size).items()
    }
    for rank in range(world):
        table, slices = {}, {}
        for name, shape in live.items():
            numel = prod(shape)
            step = -(-numel // world)
            start, end = (min(r * step, numel) for r in (rank, rank + 1))
            table[name] = {"shape": list(shape), "start": start, "end": end}
            slices[name] = (end - start,)
        path = folder / "shards" / f"rank-{rank:05d}-of-{world:05d}.safetensors"
        metadata = {"partitions": json.dumps(table)}
        write_safetensors(path, slices, "BF16", _drawing(rank, 0.02), metadata)
    document = {
        "format": 1, "world_size": world, "zero_stage": 2, "mode": "adapter", "dtype": "BF16",
        "parameters": {name: {"shape": list(shape)} for name, shape in live.items()},
    }  # fmt: skip
    (folder / "partitions.json").write_text(json.dumps(document))


def make_sparse(base: Path, adapter: Path) -> None:
    """Write a model of 100 shards and an adapter as sparse files: real headers, no data."""
    base.mkdir(parents=True)
    by_file: dict[str, dict[str, tuple[int, ...]]] = {}
    files = shard_names(HUGE.layers + 1)
    for name, shape in model_shapes(HUGE).items():
        index = int(name.split(".")[2]) + 1 if name.startswith("model.layers.") else 0
        by_file.setdefault(files[index], {})[name] = shape
    for file, shapes in by_file.items():
        write_hollow(base / file, shapes)
    _write_index(base, {name: file for file, shapes in by_file.items() for name in shapes})
    adapter.mkdir(parents=True)
    (base / "config.json").write_text(json.dumps(model_config(HUGE)))
    (adapter / "adapter_config.json").write_text(json.dumps(adapter_config(HUGE)))
    write_hollow(adapter / "adapter_model.safetensors", adapter_shapes(HUGE))


def write_hollow(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a sparse safetensors file: a real header, no data."""
    head, size = header(shapes, "BF16", {})
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + size)


MAKERS: dict[str, Callable[..., None]] = {
    "base": lambda folder, size: make_model(folder, SIZES[size]),
    "adapter": lambda folder, size: make_adapter(folder, SIZES[size]),
    "shards": lambda folder, size: make_shards(folder, SIZES[size]),
    "sparse": lambda folder: make_sparse(folder / "base", folder / "adapter"),
}

if __name__ == "__main__":
    MAKERS[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
