"""Write a plan: every output tensor goes from its source straight to its final offset in a file.

    done = write(plan, {"base": base, "adapter": adapter}, out)
    done.tensors["lm_head.weight"].checksum

Shapes are planned, so headers and all offsets are known first. Workers are threads: reading,
hashing, arithmetic and writing all release the interpreter's lock. Memory is bounded by the number
of blocks and workers, whatever the model's size, and results do not depend on the number of
workers.

Data that no operation changes never passes through Python: whole files are linked or copied, byte
ranges are copied by the kernel, and hashes come from the input's manifest. Without a manifest the
data has to be read for its hash, and is written from the same buffer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.files import SPACE_HINT, copy_file, free_bytes, write_refused
from tasks.core.terminal import in_words
from tasks.weights.compute import compute, memory, needs_torch, opened, source_bytes
from tasks.weights.files import dtypes as bits
from tasks.weights.files.documents import artifact_name
from tasks.weights.files.dtypes import ITEM_BITS, cast
from tasks.weights.files.reader import WEIGHTS, read_header
from tasks.weights.files.tensors import Sources, tensor_of, write_at
from tasks.weights.plan import Executed, Op, Plan, Written, validate

MAX_WORKERS = 16
LARGE = 32 << 20
"""Memory in bytes from which on a tensor counts as large."""
_MAX_LARGE = 2
"""Number of workers that may handle a large tensor at the same time."""
BLOCK = 1 << 20
"""Bytes per block of copied tensors: a multiple of every item size, small enough for the cache."""
_ALIGN = 8
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def write(
    plan: Plan,
    sources: Sources,
    out: Path,
    stem: str = WEIGHTS,
    scan: bool = False,
    *,
    workers: int | None = None,
) -> Executed:
    """Validate and execute a plan; `out` is a folder that gets the weight files and their index.

    Args:
        stem: start of the file names: "model" or "adapter_model".
        scan: read values of tensors too whose hashes are known.
        workers: number of threads; None for the number of cores that this process may use.

    Raises:
        ContractError: the plan does not fit its inputs.
        ArtifactError: an input cannot be read, or an output cannot be written (disk full). Nothing
            is left of the files.
    """
    validate(plan, sources)
    files = lay_out(plan, sources, stem)
    require_space(out, sum(file.size for file in files if file.link is None))
    workers = workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    tensors: dict[str, Written] = {}
    targets: list[_Target] = []
    try:
        with contextlib.ExitStack() as handles:
            for file in files:
                path = out / file.name
                if file.link is not None:
                    link_or_copy(file.link, path)
                    for op in file.ops:
                        known = str(_known_hash(op, sources))
                        tensors[op.name] = Written(file.name, known, copied=True)
                    continue
                # Replaced, never overwritten: an old file may be a hard link to an input.
                path.unlink(missing_ok=True)
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                with _refused(path):
                    handle = os.open(path, flags, 0o644)
                    handles.callback(os.close, handle)
                    # Allocated now: a full disk is noticed before hours of work, not after.
                    os.posix_fallocate(handle, 0, file.size)
                write_at(handle, memoryview(file.head), 0, path)
                targets += [(op, file.starts[op.name], path, handle) for op in file.ops]
            tensors |= _write_all(targets, sources, workers, scan)
        if len(files) > 1:
            places = {op.name: file.name for file in files for op in file.ops}
            document = {
                "metadata": {"total_size": plan.nbytes},
                "weight_map": dict(sorted(places.items())),
            }
            with _refused(out):
                text = json.dumps(document, indent=2) + "\n"
                (out / f"{stem}.safetensors.index.json").write_text(text)
    except BaseException:
        for file in files:
            (out / file.name).unlink(missing_ok=True)
        raise
    linked = [file.name for file in files if file.link is not None]
    nbytes = sum(op.nbytes for op in plan.ops if not tensors[op.name].copied)
    return Executed({op.name: tensors[op.name] for op in plan.ops}, linked, nbytes)


# Layout of the files.


@dataclass(frozen=True)
class OutFile:
    """One output file: the operations that fill it, its header, and the offsets of its tensors."""

    name: str
    ops: Sequence[Op]
    head: bytes  # length prefix and JSON header, padded so that tensors are aligned
    starts: Mapping[str, int]  # absolute offsets of the tensors by name
    size: int  # size of the whole file in bytes
    link: Path | None = None  # the input file with exactly these tensors, unchanged; else None


def lay_out(plan: Plan, sources: Sources, stem: str = WEIGHTS) -> list[OutFile]:
    """Return the output files of a plan, in order."""
    shards: list[Sequence[Op]]
    if plan.shards is not None:
        edges = accumulate(plan.shards, initial=0)
        shards = [plan.ops[low:high] for low, high in pairwise(edges)]
    else:
        shards = [*plan_shards(plan.ops, plan.max_shard_bytes)]
    names = shard_names(len(shards), stem)
    return [
        out_file(name, shard, _same_file(shard, sources))
        for name, shard in zip(names, shards, strict=True)
    ]


def plan_shards(ops: Sequence[Op], max_bytes: int | None) -> list[list[Op]]:
    """Split operations into shards of at most `max_bytes` of tensor data, keeping their order.

    A tensor larger than the limit gets its own shard. None means one shard.
    """
    shards: list[list[Op]] = [[]]
    filled = 0
    for op in ops:
        if shards[-1] and max_bytes is not None and filled + op.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(op)
        filled += op.nbytes
    return shards


def shard_names(count: int, stem: str = WEIGHTS) -> list[str]:
    """Return file names of shards as transformers and vLLM expect them."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def out_file(name: str, ops: Sequence[Op], link: Path | None = None) -> OutFile:
    """Return header and offsets of a file that contains the tensors."""
    # Wider dtypes first: with an 8-byte aligned start every tensor is then aligned to its dtype.
    ordered = sorted(ops, key=lambda op: -ITEM_BITS[op.dtype])
    edges = list(pairwise(accumulate((op.nbytes for op in ordered), initial=0)))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for op, places in zip(ordered, edges, strict=True):
        shape = list(op.shape)
        entries[op.name] = {"dtype": op.dtype, "shape": shape, "data_offsets": list(places)}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGN)
    start = 8 + len(text)
    starts = {op.name: start + at for op, (at, _) in zip(ordered, edges, strict=True)}
    size = start + sum(op.nbytes for op in ops)
    return OutFile(name, ops, struct.pack("<Q", len(text)) + text, starts, size, link)


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
    if path is None or path.suffix != ".safetensors":
        return None
    shapes = {name: info.shape for name, info in read_header(path).tensors.items()}
    return path if shapes == {op.name: op.shape for op in ops} else None


def require_space(root: Path, nbytes: int) -> None:
    """Raise ArtifactError if the disk of a folder, which may not exist yet, has less free."""
    free = free_bytes(root)
    if free < nbytes:
        raise ArtifactError(
            f"{root}: {in_words(nbytes)} will be written, {in_words(free)} are free",
            hint=SPACE_HINT,
        )


def parse_size(text: str | int) -> int:
    """Parse a size in bytes: "5GB" -> 5_000_000_000. Also B, KB, MB, KiB, MiB, GiB, plain numbers.

    Raises ConfigError for anything else, and for 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", str(text).upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size <= 0:
        raise ConfigError(
            f"convert.max_shard_size={text!r} is not a size",
            hint="write it like convert.max_shard_size=5GB (B, KB, MB, GB, KiB, MiB, GiB)",
        )
    return size


# Tensors.


_Target = tuple[Op, int, Path, int]
"""Operation, offset of its tensor in a file, the file, and its handle."""


class _Stopped(Exception):
    """Another tensor has failed, or the user has interrupted the run."""


def _write_all(
    targets: Sequence[_Target], sources: Sources, workers: int, scan: bool
) -> dict[str, Written]:
    """Write all tensors with threads; the first error stops every one of them."""
    large, stop = threading.Semaphore(_MAX_LARGE), threading.Event()

    def run(target: _Target) -> tuple[str, Written]:
        is_large = memory(target[0], sources) > LARGE
        with large if is_large else contextlib.nullcontext():
            return target[0].name, _write(target, sources, stop, scan)

    # The largest first, so that no thread starts a large one at the end.
    ordered = sorted(targets, key=lambda target: -target[0].nbytes)
    with_torch = any(needs_torch(op, sources) for op, *_ in targets)
    with (
        _single_threaded_torch() if with_torch else contextlib.nullcontext(),
        ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool,
    ):
        try:
            futures = [pool.submit(run, target) for target in ordered]
            return dict(future.result() for future in as_completed(futures))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write(target: _Target, sources: Sources, stop: threading.Event, scan: bool) -> Written:
    """Write one tensor. Raises ArtifactError if an input differs from its manifest."""
    op, start, path, handle = target
    written = Written(path.name)
    known = _known_hash(op, sources) if op.kind == "copy" else None
    if known is not None and not scan:
        with opened(op, sources) as reader:
            written.copied = reader.copy_to(handle, start)
    if written.copied and known is not None:
        written.checksum = known
    else:
        checksum, at = blake3(), start
        made = compute if op.kind == "compute" else _moved
        for raw in made(op, sources, written):
            if stop.is_set():
                raise _Stopped
            write_at(handle, memoryview(raw), at, path)
            checksum.update(raw)
            at += raw.size
        if at != start + op.nbytes:
            raise ArtifactError(f"{path}: {op.name}: {start + op.nbytes - at} bytes are missing")
        written.checksum = checksum.hexdigest()
        if known not in (None, written.checksum):
            raise ArtifactError(f"{op.source}: its bytes do not match the hash in its manifest")
    # The kernel starts to write the tensor to disk now, so that the final flush is short.
    os.posix_fadvise(handle, start, op.nbytes, os.POSIX_FADV_DONTNEED)
    return written


def _moved(op: Op, sources: Sources, written: Written) -> Iterator[NDArray[np.uint8]]:
    """Yield the blocks of a tensor that is copied or cast; valid until the next is requested."""
    zero = True
    with opened(op, sources) as reader:
        buffer: NDArray[np.uint8] = np.empty(min(BLOCK, reader.nbytes), np.uint8)
        for at in range(0, reader.nbytes, BLOCK):
            raw = buffer[: min(BLOCK, reader.nbytes - at)]
            reader.into(raw, at)
            if op.kind == "cast":
                raw = cast(raw, op.source_dtype, op.dtype)
            written.nonfinite += bits.nonfinite(raw, op.dtype)
            zero = zero and bits.all_zero(raw, op.dtype)
            yield raw
    written.all_zero = zero


def _known_hash(op: Op, sources: Sources) -> str | None:
    """Return the source tensor's hash; None if unknown, or if `op` reads only a part of it."""
    tensor = tensor_of(op.source, sources)
    return tensor.hash if source_bytes(op) == tensor.nbytes else None


def link_or_copy(source: Path, target: Path) -> None:
    """Give `target` the bytes of a file: a hard link within one store of artifacts, else a copy.

    A hard link shares its bytes with the source for good, so the source must be a published
    artifact, and both become read-only. Raises ArtifactError if `target` cannot be written.
    """
    real = source.resolve()  # link to the file itself, not to a symbolic link
    # A store is `<paths.runs>/artifacts`, with a folder `<kind>/<key>` for each artifact.
    folder, store = real.parent, target.resolve().parent.parent.parent
    in_store = store.name == "artifacts" and folder.parent.parent == store
    target.unlink(missing_ok=True)
    with _refused(target):
        if in_store and artifact_name(folder) == (folder.parent.name, folder.name):
            with contextlib.suppress(OSError):  # a file system without hard links
                os.link(real, target)
                target.chmod(target.stat().st_mode & 0o444)
                return
        copy_file(real, target)


@contextlib.contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise write_refused(path, error) from error


@contextlib.contextmanager
def _single_threaded_torch() -> Iterator[None]:
    """Run torch operations on one thread each: the workers provide the parallelism.

    Otherwise every worker would start its own thread pool, and the pools would compete for cores.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
