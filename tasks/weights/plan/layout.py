"""Where every output tensor of a plan goes, and which files need not be written at all.

A file that would hold exactly the tensors that one input file holds, unchanged, is that file: it is
linked. Which ones those are follows from plan and inputs alone, so it is the same in every run.
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
        file: name, header, offsets.
        ops: what fills it.
        link: the input file that it is, byte for byte; None when it has to be written.
    """

    file: ShardFile
    ops: tuple[Op, ...]
    link: Path | None = None

    @property
    def name(self) -> str:
        """File name."""
        return self.file.name


def lay_out(plan: Plan, sources: Mapping[str, Source], *, stem: str = WEIGHTS) -> list[OutFile]:
    """All output files of a plan, in order."""
    shards = _shards(plan)
    headers: dict[Path, Header | None] = {}
    found = []
    for name, ops in zip(shard_names(len(shards), stem), shards, strict=True):
        file = shard_file(name, [Spec(op.name, op.shape, op.dtype) for op in ops])
        found.append(OutFile(file, tuple(ops), _same_file(ops, sources, headers)))
    return found


def as_is(source: Source, name: str = WEIGHTS) -> Plan:
    """Every tensor of an input as it is. `name`: what the plan calls the input."""
    ops = tuple(
        Op(key, tuple(info.shape), info.dtype, f"{name}:{key}", info.dtype)
        for key, info in source.tensors.items()
    )
    return Plan(ops)


def with_output(
    plan: Plan, *, dtype: str | None, max_shard_bytes: int, files: Mapping[str, str]
) -> Plan:
    """The same plan with floats in another dtype, and files of another size.

    Args:
        plan: operations in the order of the input's files.
        dtype: safetensors name; None leaves every tensor's own.
        max_shard_bytes: bound of a file's tensor data.
        files: input file by source key. Where no dtype changes and none of these files is larger
            than allowed the output has the same files, so that untouched ones can be linked.
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
    """The input file that has these tensors, all of them, unchanged, with known hashes."""
    paths: set[Path] = set()
    for op in ops:
        source = sources[op.input]
        extents = source.extents(op.key)
        plain = op.kind == "copy" and op.name == op.key and op.start == 0 and len(extents) == 1
        if not plain or source.sha256(op.key) is None or extents[0].nbytes != op.nbytes:
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
        return None  # not a safetensors file, whatever it is called; its tensors are copied
