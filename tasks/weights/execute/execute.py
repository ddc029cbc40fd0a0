"""Execute a plan: write every output tensor from its source straight to its final offset.

    done = execute(plan, {"base": base, "adapter": adapter}, out)
    done.tensors["lm_head.weight"].checksum

Workers are threads: reading, hashing, arithmetic and writing all release the interpreter's lock.
Memory is bounded by the number of blocks and workers, whatever the model's size. Results do not
depend on the number of workers: see `compute.py`.

Data that no operation changes never passes through Python: whole files are linked or copied, byte
ranges are copied by the kernel, and hashes come from the input's manifest. Without a manifest the
data has to be read for its hash, and is written from the same buffer.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from tasks.core.disk import write_refused
from tasks.core.errors import ArtifactError
from tasks.core.files import copy_file
from tasks.weights.execute.compute import compute, needs_full_tensor, opened, source_bytes
from tasks.weights.execute.lora_merge import fold, fold_term, size_of_a
from tasks.weights.execute.outcome import Executed, Written
from tasks.weights.execute.writer import ShardFile, lay_out, require_space, write_index
from tasks.weights.files import dtypes as bits
from tasks.weights.files.documents import artifact_name
from tasks.weights.files.dtypes import cast, casts, torch_dtype
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.files.tensors import Sources, tensor_of, write_at
from tasks.weights.plan import Op, Plan, operands

MAX_WORKERS = 16
LARGE = 32 << 20
"""Memory in bytes from which on a tensor counts as large."""
_MAX_LARGE = 2
"""Number of workers that may handle a large tensor at the same time."""
BLOCK = 1 << 20
"""Bytes per block of copied tensors: a multiple of every item size, small enough for the cache."""


def execute(
    plan: Plan,
    sources: Sources,
    out: Path,
    *,
    workers: int | None = None,
    stem: str = WEIGHTS,
    scan: bool = False,
) -> Executed:
    """Execute a plan that `validate` has accepted.

    Args:
        out: existing directory; gets the weight files and their index.
        workers: number of threads; None for the number of cores that this process may use.
        stem: start of the file names: "model" or "adapter_model".
        scan: read values of tensors too whose hashes are known.

    Raises:
        ArtifactError: an input cannot be read, or an output cannot be written (disk full). Nothing
            is left of the files.
    """
    files = lay_out(plan, sources, stem=stem)
    require_space(out, sum(each.file.size for each in files if each.link is None))
    workers = workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))
    tensors: dict[str, Written] = {}
    targets: list[_Target] = []
    try:
        with contextlib.ExitStack() as handles:
            for each in files:
                path = out / each.file.name
                if each.link is not None:
                    link_or_copy(each.link, path)
                    for op in each.ops:
                        known = str(_known_hash(op, sources))
                        tensors[op.name] = Written(path.name, known, copied=True)
                    continue
                handle = _claimed(path, each.file)
                handles.callback(os.close, handle)
                starts = each.file.starts
                targets += [_Target(op, handle, path, starts[op.name]) for op in each.ops]
            tensors |= _write_all(targets, sources, workers, scan)
        if len(files) > 1:
            with _refused(out):
                write_index(out, files, stem)
    except BaseException:
        for each in files:
            (out / each.file.name).unlink(missing_ok=True)
        raise
    linked = [each.file.name for each in files if each.link is not None]
    nbytes = sum(op.nbytes for op in plan.ops if not tensors[op.name].copied)
    return Executed({op.name: tensors[op.name] for op in plan.ops}, linked, nbytes)


@dataclass(frozen=True)
class _Target:
    """One tensor to write: its operation, and its place in an open file."""

    op: Op
    handle: int
    path: Path
    start: int


class _Stopped(Exception):
    """Another tensor has failed, or the user has interrupted the run."""


def _write_all(
    targets: Sequence[_Target], sources: Sources, workers: int, scan: bool
) -> dict[str, Written]:
    """Write all tensors with threads; the first error stops every one of them."""
    large, stop = threading.Semaphore(_MAX_LARGE), threading.Event()

    def write(target: _Target) -> tuple[str, Written]:
        is_large = _memory(target.op, sources) > LARGE
        with large if is_large else contextlib.nullcontext():
            return target.op.name, _write(target, sources, stop, scan)

    # The largest first, so that no thread starts a large one at the end.
    ordered = sorted(targets, key=lambda target: -target.op.nbytes)
    needs_torch = any(_needs_torch(target.op, sources) for target in targets)
    with (
        _single_threaded_torch() if needs_torch else contextlib.nullcontext(),
        ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool,
    ):
        try:
            futures = [pool.submit(write, target) for target in ordered]
            return dict(future.result() for future in as_completed(futures))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _write(target: _Target, sources: Sources, stop: threading.Event, scan: bool) -> Written:
    """Write one tensor. Raises ArtifactError if an input differs from its manifest."""
    op, handle, at = target.op, target.handle, target.start
    end = at + op.nbytes
    written = Written(target.path.name)
    known = _known_hash(op, sources) if op.kind == "copy" else None
    if known is not None and not scan:
        with opened(op, sources) as reader:
            written.copied = reader.copy_to(handle, at)
    if written.copied and known is not None:
        written.checksum = known
    else:
        checksum = blake3()
        for raw in _computed(op, sources, written):
            if stop.is_set():
                raise _Stopped
            write_at(handle, memoryview(raw), at, target.path)
            checksum.update(raw)
            at += raw.size
        if at != end:
            raise ArtifactError(f"{target.path}: {op.name}: {end - at} bytes are missing")
        written.checksum = checksum.hexdigest()
        if known not in (None, written.checksum):
            raise ArtifactError(f"{op.source}: its bytes do not match the hash in its manifest")
    # The kernel starts to write the tensor to disk now, so that the final flush is short.
    os.posix_fadvise(handle, target.start, op.nbytes, os.POSIX_FADV_DONTNEED)
    return written


def _computed(op: Op, sources: Sources, written: Written) -> Iterator[NDArray[np.uint8]]:
    """Return the blocks of a tensor, and count what is in them."""
    if op.kind != "compute":
        return _moved(op, sources, written)
    if (term := fold_term(op, sources)) is not None:
        return fold(op, term, sources, written)
    return compute(op, sources, written)


def _moved(op: Op, sources: Sources, written: Written) -> Iterator[NDArray[np.uint8]]:
    """Yield the blocks of a tensor that is copied or cast; valid until the next is requested."""
    zero = True
    with opened(op, sources) as reader:
        buffer: NDArray[np.uint8] = np.empty(min(BLOCK, reader.nbytes), np.uint8)
        for at in range(0, reader.nbytes, BLOCK):
            raw = buffer[: min(BLOCK, reader.nbytes - at)]
            reader.into(raw, at)
            if op.kind == "cast":
                raw = _cast(raw, op)
            written.nonfinite += bits.nonfinite(raw, op.dtype)
            zero = zero and bits.all_zero(raw, op.dtype)
            yield raw
    written.all_zero = zero


def _cast(raw: NDArray[np.uint8], op: Op) -> NDArray[np.uint8]:
    if casts(op.source_dtype, op.dtype):
        return cast(raw, op.source_dtype, op.dtype)
    import torch

    values = torch.from_numpy(raw).view(torch_dtype(op.source_dtype)).to(torch_dtype(op.dtype))
    cast_bytes: NDArray[np.uint8] = values.view(torch.uint8).numpy()
    return cast_bytes


def _known_hash(op: Op, sources: Sources) -> str | None:
    """Return the source tensor's hash; None if unknown, or if `op` reads only a part of it."""
    tensor = tensor_of(op.source, sources)
    return tensor.hash if source_bytes(op) == tensor.nbytes else None


def link_or_copy(source: Path, target: Path) -> None:
    """Give `target` the bytes of a file: a hard link within one store of artifacts, else a copy.

    A hard link shares its bytes with the source for good, so the source must be a published
    artifact, and both become read-only. A copy shares them until one side is written, if the file
    system can do that (btrfs, XFS).

    Raises:
        ArtifactError: `target` cannot be written.
    """
    real = source.resolve()  # link to the file itself, not to a symbolic link
    target.unlink(missing_ok=True)
    with _refused(target):
        if _in_one_store(real, target):
            with contextlib.suppress(OSError):  # a file system without hard links
                os.link(real, target)
                target.chmod(target.stat().st_mode & 0o444)
                return
        copy_file(real, target)


def _in_one_store(source: Path, target: Path) -> bool:
    """Return True if `source` is a published artifact of the store that `target` is made in.

    A store is `<paths.runs>/artifacts`, with a folder `<kind>/<key>` for each artifact.
    """
    folder, store = source.parent, target.resolve().parent.parent.parent
    if store.name != "artifacts" or folder.parent.parent != store:
        return False
    return artifact_name(folder) == (folder.parent.name, folder.name)


def _needs_torch(op: Op, sources: Sources) -> bool:
    if op.kind == "cast":
        return not casts(op.source_dtype, op.dtype)
    return op.kind == "compute" and fold_term(op, sources) is None


def _memory(op: Op, sources: Sources) -> int:
    """Return the bytes of memory that an operation takes in addition to its blocks."""
    if op.kind != "compute":
        return 0
    if (term := fold_term(op, sources)) is not None:
        return size_of_a(term, sources)
    count = 2 * prod(op.read_shape) if needs_full_tensor(op) else 0
    names = (name for term in op.terms for name in operands(term))
    return 4 * (count + sum(prod(tensor_of(name, sources).shape) for name in names))


def _claimed(path: Path, file: ShardFile) -> int:
    """Open a new output file, allocate all its space and write its header. Returns its handle."""
    # Replaced, never overwritten: an old file may be a hard link to an input.
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        # Allocates the space now: a full disk is noticed before hours of work, not after.
        with _refused(path):
            os.posix_fallocate(handle, 0, file.size)
        write_at(handle, memoryview(file.head), 0, path)
    except BaseException:
        os.close(handle)
        raise
    return handle


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
