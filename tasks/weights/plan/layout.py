"""Assign the output tensors of a plan to files, and find files that can be linked.

An output file with exactly the tensors of one input file, unchanged, is a link to that file. This
depends on plan and inputs alone, so it is the same in every run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.weights.execute.writer import ShardFile, Spec, plan_shards, shard_file, shard_names
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.files.header import Header, read_header
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.files.source import Source
from tasks.weights.plan.operations import Op, Plan


@dataclass(frozen=True)
class OutFile:
    """One output file.

    Attributes:
        file: its name, header and offsets.
        ops: the operations that fill it.
        link: the identical input file; None if the file has to be written.
    """

    file: ShardFile
    ops: tuple[Op, ...]
    link: Path | None = None

    @property
    def name(self) -> str:
        """Name of the file."""
        return self.file.name


def lay_out(plan: Plan, sources: Mapping[str, Source], *, stem: str = WEIGHTS) -> list[OutFile]:
    """Return the output files of a plan, in order."""
    shards = _shards(plan)
    headers: dict[Path, Header | None] = {}
    files = []
    for name, ops in zip(shard_names(len(shards), stem), shards, strict=True):
        file = shard_file(name, [Spec(op.name, op.shape, op.dtype) for op in ops])
        files.append(OutFile(file, tuple(ops), _same_file(ops, sources, headers)))
    return files


def as_is(source: Source, name: str = WEIGHTS) -> Plan:
    """Return the plan that copies every tensor of a source.

    Args:
        source: the input.
        name: name of the input in the plan.
    """
    ops = tuple(
        Op(key, tuple(info.shape), info.dtype, f"{name}:{key}", info.dtype)
        for key, info in source.tensors.items()
    )
    return Plan(ops)


def with_output(
    plan: Plan, *, dtype: str | None, max_shard_bytes: int, files: Mapping[str, str]
) -> Plan:
    """Return the same plan with another dtype for floats and another size of files.

    The output keeps the files of the input if no dtype changes and none of them is too large, so
    that unchanged files can be linked.

    Args:
        plan: operations in the order of the input's files.
        dtype: safetensors name for all float tensors; None keeps the dtype of each tensor.
        max_shard_bytes: limit of the tensor data in one file.
        files: name of the input file by source key.
    """
    ops = tuple(
        replace(op, dtype=dtype) if dtype is not None and is_float(op.dtype) else op
        for op in plan.ops
    )
    sizes: dict[str, int] = {}
    counts: dict[str, int] = {}
    for op in ops:
        file = files.get(op.key, "")
        sizes[file] = sizes.get(file, 0) + op.nbytes
        counts[file] = counts.get(file, 0) + 1
    order = [file for file, _ in groupby(files.get(op.key, "") for op in ops)]
    same = (
        len(order) == len(counts)
        and all(op.dtype == op.source_dtype for op in ops)
        and all(size <= max_shard_bytes for size in sizes.values())
    )
    shards = tuple(counts.values()) if same else None
    return replace(plan, ops=ops, max_shard_bytes=max_shard_bytes, shards=shards)


def _shards(plan: Plan) -> list[Sequence[Op]]:
    if plan.shards is not None:
        edges = accumulate(plan.shards, initial=0)
        return [plan.ops[low:high] for low, high in pairwise(edges)]
    by_name = {op.name: op for op in plan.ops}
    specs = [Spec(op.name, op.shape, op.dtype) for op in plan.ops]
    return [[by_name[s.name] for s in shard] for shard in plan_shards(specs, plan.max_shard_bytes)]


def _same_file(
    ops: Sequence[Op], sources: Mapping[str, Source], headers: dict[Path, Header | None]
) -> Path | None:
    """Return the input file with exactly these tensors, unchanged and with known hashes."""
    paths: set[Path] = set()
    for op in ops:
        source = sources[op.input]
        extents = source.extents(op.key)
        plain = op.kind == "copy" and op.name == op.key and op.start == 0 and len(extents) == 1
        if not plain or source.checksum(op.key) is None or extents[0].nbytes != op.nbytes:
            return None
        paths.add(extents[0].path)
    if len(paths) != 1:
        return None
    (path,) = paths
    if path not in headers:
        headers[path] = _header(path)
    header = headers[path]
    if header is None or {op.name: op.shape for op in ops} != {
        name: info.shape for name, info in header.tensors.items()
    }:
        return None
    return path


def _header(path: Path) -> Header | None:
    try:
        return read_header(path) if path.suffix == ".safetensors" else None
    except ArtifactError:
        return None  # not a safetensors file in spite of its name; its tensors are copied
