"""Read the partitions of trainable parameters that every rank wrote, as full tensors.

Layout (written by `tasks/training`): each rank writes one file such as
`shards/rank-00000-of-00002.safetensors` with 1-D slices by parameter name. Its metadata entry
`partitions` has the place of each slice in the flattened parameter; `partitions.json` has the full
shapes. The slices of a parameter must cover [0, numel) exactly once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.documents import parse_json, read_json
from tasks.weights.files.dtypes import ITEM_BITS
from tasks.weights.files.reader import Header, read_header, weight_files
from tasks.weights.files.tensors import Extent, Tensor, Tensors
from tasks.weights.pickled.torch_file import is_shape

PARTITIONS = "partitions.json"
SHARDS = "shards"
_MAX_RANKS = 1 << 16
_SHOWN = 50


@dataclass(frozen=True)
class Partitions:
    """All parameters in training's order, from slices that were checked for coverage."""

    tensors: Tensors
    root: Path  # folder with `partitions.json`
    mode: str  # "adapter" or "full"
    dtype: str  # safetensors name, the same for all parameters
    world_size: int


def rank_file(rank: int, world_size: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def read_partitions(root: Path) -> Partitions:
    """Read and check the shards that training left in `root`.

    Raises:
        ArtifactError: lists every finding: missing, stray or truncated rank files; slices without
            a place, of an unknown parameter or of another dtype; gaps and overlaps.
    """
    table = _read_table(root / PARTITIONS)
    world_size, dtype = table["world_size"], table["dtype"]
    wanted = [rank_file(rank, world_size) for rank in range(world_size)]
    present = {path.name for path in weight_files(root / SHARDS, "*.safetensors")}
    findings = [f"{name}: stray rank file" for name in sorted(present - set(wanted))]
    shapes = {name: tuple(entry["shape"]) for name, entry in table["parameters"].items()}
    slices: dict[str, list[tuple[int, int, Extent]]] = {name: [] for name in shapes}
    is_whole = True
    for file in wanted:
        try:
            header = read_header(root / SHARDS / file)
        except ArtifactError as error:
            findings.append(error.message)
            is_whole = False  # each parameter would have a gap
            continue
        try:
            places = _places(header)
        except (KeyError, TypeError, ValueError, AttributeError):
            findings.append(f"{file}: metadata has no readable partition table")
            continue
        for name, (shape, start, end) in sorted(places.items()):
            tensor = header.tensors.get(name)
            if tensor is None or shape != shapes.get(name):
                findings.append(f"{file}: {name} {list(shape)} is not a tensor of {PARTITIONS}")
            elif tensor.dtype != dtype or not 0 <= start <= end or tensor.numel != end - start:
                have = f"{tensor.dtype} {tensor.numel} elements, its place is [{start}, {end})"
                findings.append(f"{file}: {name}: {have}, {PARTITIONS} says {dtype}")
            elif tensor.numel:
                slices[name].append((start, end, tensor.extents[0]))
        for name in sorted(set(header.tensors) - set(places)):
            findings.append(f"{file}: {name} has no place in its table")
    for name, shape in shapes.items() if is_whole else ():
        at = 0
        slices[name].sort(key=lambda piece: piece[:2])
        for start, end, extent in [*slices[name], (prod(shape), prod(shape), None)]:
            if start != at:
                other = extent.path.name if extent else "beyond its end"
                wrong = "no rank's file" if start > at else f"two files, once {other}"
                text = f"{name}: elements {min(at, start)} to {max(at, start)} are in {wrong}"
                findings.append(text)
                break
            at = end
    if findings:
        raise ArtifactError(
            f"{root}: shards do not make whole tensors: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint="train again: force=[train]",
        )
    tensors = {
        name: Tensor(shape, dtype, tuple(extent for _, _, extent in slices[name]))
        for name, shape in shapes.items()
    }
    return Partitions(tensors, root, table["mode"], dtype, world_size)


def _read_table(path: Path) -> dict[str, Any]:
    table = read_json(path)
    parameters, world_size = table.get("parameters"), table.get("world_size")
    if table.get("format") != 1:
        raise ArtifactError(f"{path}: not a partition table of format 1")
    if table.get("mode") not in ("adapter", "full") or str(table.get("dtype")) not in ITEM_BITS:
        raise ArtifactError(f"{path}: its mode or dtype is not supported")
    if type(world_size) is not int or not 0 < world_size <= _MAX_RANKS:
        raise ArtifactError(f"{path}: world_size {str(world_size)[:20]} is not valid")
    if not isinstance(parameters, dict) or not parameters:
        raise ArtifactError(f"{path}: names no parameter: nothing was trained")
    entries = parameters.values()
    if not all(isinstance(entry, dict) and is_shape(entry.get("shape")) for entry in entries):
        raise ArtifactError(f"{path}: its parameters have no shapes")
    return table


def _places(header: Header) -> dict[str, tuple[tuple[int, ...], int, int]]:
    """Return shape of the parameter, start and end by name, from one rank's metadata."""
    return {
        name: (tuple(entry["shape"]), int(entry["start"]), int(entry["end"]))
        for name, entry in parse_json(header.metadata["partitions"].encode()).items()
    }
