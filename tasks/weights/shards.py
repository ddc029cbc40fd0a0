"""Read the partitions of trainable parameters that every rank wrote, as full tensors.

Layout (written by `tasks/training`): each rank writes one file such as
`shards/rank-00000-of-00002.safetensors` with 1-D slices by parameter name. Its metadata entry
`partitions` has the place of each slice in the flattened parameter; `partitions.json` has the full
shapes. The slices of a parameter must cover [0, numel) exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.documents import parse_json, read_json
from tasks.weights.files.dtypes import ITEM_BITS
from tasks.weights.files.reader import Header, read_header, weight_files
from tasks.weights.files.tensors import Extent, Tensor, Tensors

PARTITIONS = "partitions.json"
SHARDS = "shards"
MAX_RANKS = 1 << 16
_SHOWN = 50


@dataclass(frozen=True, order=True)
class Slice:
    """Elements [start, end) of a flattened parameter, and the file that holds them."""

    start: int
    end: int
    file: str


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
    findings: list[str] = []
    world_size, dtype = table["world_size"], table["dtype"]
    wanted = [rank_file(rank, world_size) for rank in range(world_size)]
    present = {path.name for path in weight_files(root / SHARDS, "*.safetensors")}
    findings += [f"{name}: stray rank file" for name in sorted(present - set(wanted))]
    headers: dict[str, Header] = {}
    for name in wanted:
        try:
            headers[name] = read_header(root / SHARDS / name)
        except ArtifactError as error:
            findings.append(error.message)
    shapes = {name: tuple(entry["shape"]) for name, entry in table["parameters"].items()}
    slices_of: dict[str, list[Slice]] = {name: [] for name in shapes}
    for file, header in headers.items():
        findings += _collect(file, header, shapes, dtype, slices_of)
    if len(headers) == len(wanted):  # a missing file would add a gap for every parameter
        for name, shape in shapes.items():
            findings += coverage(name, prod(shape), slices_of[name])
    if findings:
        raise ArtifactError(
            f"{root}: shards do not make whole tensors: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint="train again: force=[train]",
        )

    def extents(name: str) -> Iterator[Extent]:
        for piece in sorted(each for each in slices_of[name] if each.end > each.start):
            yield from headers[piece.file].tensors[name].extents

    tensors = {n: Tensor(shape, dtype, tuple(extents(n))) for n, shape in shapes.items()}
    return Partitions(tensors, root, table["mode"], dtype, world_size)


def coverage(name: str, numel: int, slices: list[Slice]) -> list[str]:
    """Return the first gap or overlap in the slices of one parameter; empty if there is none."""
    at = 0
    for piece in sorted(s for s in slices if s.end > s.start):
        if piece.start > at:
            return [f"{name}: elements {at} to {piece.start} are in no rank's file"]
        if piece.start < at:
            return [f"{name}: elements {piece.start} to {at} are in two files, once {piece.file}"]
        at = piece.end
    if at < numel:
        return [f"{name}: elements {at} to {numel} are in no rank's file"]
    return [f"{name}: has {numel} elements, but its slices end at {at}"] if at > numel else []


def _read_table(path: Path) -> dict[str, Any]:
    table = read_json(path)
    parameters, world_size = table.get("parameters"), table.get("world_size")
    if table.get("format") != 1:
        raise ArtifactError(f"{path}: not a partition table of format 1")
    if table.get("mode") not in ("adapter", "full") or str(table.get("dtype")) not in ITEM_BITS:
        raise ArtifactError(f"{path}: its mode or dtype is not supported")
    if type(world_size) is not int or not 0 < world_size <= MAX_RANKS:
        raise ArtifactError(f"{path}: world_size {str(world_size)[:20]} is not valid")
    if not isinstance(parameters, dict) or not all(map(_has_shape, parameters.values())):
        raise ArtifactError(f"{path}: its parameters have no shapes")
    if not parameters:
        raise ArtifactError(f"{path}: names no parameter: nothing was trained")
    return table


def _has_shape(entry: object) -> bool:
    shape = entry.get("shape") if isinstance(entry, dict) else None
    return isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)


def _collect(
    file: str,
    header: Header,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    slices_of: dict[str, list[Slice]],
) -> Iterator[str]:
    """Add one rank's slices to `slices_of`; yield the findings."""
    try:
        table = parse_json(header.metadata["partitions"].encode())
        places = {
            name: (tuple(entry["shape"]), int(entry["start"]), int(entry["end"]))
            for name, entry in table.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError):
        yield f"{file}: metadata has no readable partition table"
        return
    for name in sorted(set(places) ^ set(header.tensors)):
        yield f"{file}: {name} is in its table or in its tensors, not in both"
    for name in sorted(set(places) & set(header.tensors)):
        (shape, start, end), info = places[name], header.tensors[name]
        if name not in shapes:
            yield f"{file}: {name} is not in {PARTITIONS}"
        elif shape != shapes[name]:
            yield f"{file}: {name} is {list(shape)}, {PARTITIONS}: {list(shapes[name])}"
        elif info.dtype != dtype:
            yield f"{file}: {name} is {info.dtype}, {PARTITIONS} says {dtype}"
        elif not 0 <= start <= end or prod(info.shape) != end - start:
            yield f"{file}: {name} holds {prod(info.shape)} elements, its place is [{start}, {end})"
        else:
            slices_of[name].append(Slice(start, end, file))
