"""Execute a plan: write every output tensor from its source straight to its final offset.

    done = execute(plan, {"base": base, "adapter": adapter}, out)
    done.checksums["lm_head.weight"]

Workers are threads: reading, hashing, arithmetic and writing all release the interpreter's lock.
Memory is bounded by the number of blocks and workers, whatever the model's size. Results do not
depend on the number of workers: see `compute.py`.

Data that no operation changes never passes through Python: whole files are linked or copied
(`copying.py`), byte ranges are copied by the kernel, and hashes come from the input's manifest.
Without a manifest the data has to be read for its hash, and is written from the same buffer.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from tasks.core.disk import write_refused
from tasks.core.errors import ArtifactError
from tasks.weights.execute.compute import compute, matrix_shape, needs_full_tensor
from tasks.weights.execute.copying import (
    Seen,
    Workspace,
    known_hash,
    link_or_copy,
    move,
    offload,
    same_as_known,
)
from tasks.weights.execute.lora_merge import fold, fold_term, size_of_a
from tasks.weights.execute.outcome import Executed, Measured, Outcome
from tasks.weights.execute.writer import ShardFile, Spec, require_space, write_index
from tasks.weights.files.dtypes import casts
from tasks.weights.files.header import TensorInfo
from tasks.weights.files.reader import WEIGHTS
from tasks.weights.files.source import Source, info_of, write_at
from tasks.weights.plan import Op, OutFile, Plan, lay_out, operands

MAX_WORKERS = 16
LARGE = 32 << 20
"""Memory in bytes from which on a tensor counts as large."""
_MAX_LARGE = 2
"""Number of workers that may handle a large tensor at the same time."""


def execute(
    plan: Plan,
    sources: Mapping[str, Source],
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

    Raises:
        ArtifactError: an input cannot be read, or an output cannot be written (disk full). Nothing
            is left of the files.
    """
    files = lay_out(plan, sources, stem=stem)
    require_space(out, sum(file.file.size for file in files if file.link is None))
    writing = _Writing(sources, scan)
    try:
        with contextlib.ExitStack() as handles:
            jobs = [job for file in files for job in writing.begin(out / file.name, file, handles)]
            writing.to_end(jobs, workers or min(MAX_WORKERS, len(os.sched_getaffinity(0))))
        if len(files) > 1:
            places = {op.name: file.name for file in files for op in file.ops}
            specs = [Spec(op.name, op.shape, op.dtype) for op in plan.ops]
            with _refused(out):
                write_index(out, specs, places, stem)
    except BaseException:
        for file in files:
            (out / file.name).unlink(missing_ok=True)
        raise
    ordered = {op.name: writing.outcomes[op.name] for op in plan.ops}
    linked = [file.name for file in files if file.link is not None]
    return Executed(ordered, linked, writing.read, writing.written)


class Sink:
    """Write one output tensor to its offset, piece by piece.

    Attributes:
        handle: descriptor of the open file.
        path: path of the file.
        info: position of the tensor in the file.
    """

    def __init__(self, handle: int, path: Path, info: TensorInfo) -> None:
        self.handle, self.path, self.info = handle, path, info
        self._hash = blake3()
        self._at = info.start

    def write(self, raw: NDArray[np.uint8]) -> None:
        """Append the next bytes of the tensor. Raises ArtifactError if the disk is full."""
        write_at(self.handle, memoryview(raw), self._at, self.path)
        self._hash.update(raw)
        self._at += raw.size

    def start_flush(self) -> None:
        """Ask the kernel to start writing the tensor to disk, so that the final flush is short.

        The advice says that the pages are no longer needed; the kernel then writes dirty ones out.
        """
        os.posix_fadvise(self.handle, self.info.start, self.info.nbytes, os.POSIX_FADV_DONTNEED)

    def checksum(self) -> str:
        """Return the BLAKE3 hash of the full tensor. Raises ArtifactError if bytes are missing."""
        if self._at != self.info.end:
            done = self._at - self.info.start
            raise ArtifactError(f"{self.path}: {done} of {self.info.nbytes} bytes were written")
        return self._hash.hexdigest()


class _Stopped(Exception):
    """Another tensor has failed, or the user has interrupted the run."""


@dataclass
class _Writing:
    """State of one run."""

    sources: Mapping[str, Source]  # inputs of the plan by name
    scan: bool  # inspect copied values too
    outcomes: dict[str, Outcome] = field(default_factory=dict)  # finished tensors by name
    read: int = 0  # bytes of tensor data that this process read; kernel copies are not counted
    written: int = 0  # bytes of tensor data that this process wrote
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _large: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(_MAX_LARGE))
    _stop: threading.Event = field(default_factory=threading.Event)
    _of_thread: threading.local = field(default_factory=threading.local)

    def begin(
        self, path: Path, file: OutFile, handles: contextlib.ExitStack
    ) -> Iterator[tuple[Op, Sink]]:
        """Link a file, or claim its space and yield the tensors to write into it."""
        if file.link is not None:
            link_or_copy(file.link, path)
            for op in file.ops:
                known = str(known_hash(op, self.sources))
                self.outcomes[op.name] = Outcome(op.name, path.name, known, all_zero=None)
            return
        handle = _claimed(path, file.file)
        handles.callback(os.close, handle)
        for op in file.ops:
            yield op, Sink(handle, path, file.file.infos[op.name])

    def to_end(self, jobs: Sequence[tuple[Op, Sink]], workers: int) -> None:
        """Write all tensors, the largest first, so that no thread starts a large one at the end."""
        ordered = sorted(jobs, key=lambda job: -job[0].nbytes)
        needs_torch = any(_needs_torch(op, self.sources) for op, _ in ordered)
        with (
            _single_threaded_torch() if needs_torch else contextlib.nullcontext(),
            ThreadPoolExecutor(workers, thread_name_prefix="weights") as pool,
        ):
            try:
                futures = [pool.submit(self._write, op, sink) for op, sink in ordered]
                finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in finished:
                    future.result()
            except BaseException:
                self._stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _write(self, op: Op, sink: Sink) -> None:
        large = _memory(op, self.sources) > LARGE
        with self._large if large else contextlib.nullcontext():
            outcome, read, written = (
                self._computed(op, sink) if op.kind == "compute" else self._moved(op, sink)
            )
        with self._lock:
            self.outcomes[op.name] = outcome
            self.read, self.written = self.read + read, self.written + written

    def _moved(self, op: Op, sink: Sink) -> tuple[Outcome, int, int]:
        moved = None if self.scan else self._offloaded(op, sink)
        if moved is not None:
            sink.start_flush()
            return moved, 0, 0
        seen = Seen()
        self._fill(sink, move(op, self.sources, self._workspace, seen))
        checksum = same_as_known(op, self.sources, sink.checksum())
        outcome = Outcome(op.name, sink.path.name, checksum, seen.nonfinite, seen.all_zero)
        return outcome, seen.read, op.nbytes

    def _offloaded(self, op: Op, sink: Sink) -> Outcome | None:
        known = offload(op, self.sources, sink.handle, sink.info.start)
        return None if known is None else Outcome(op.name, sink.path.name, known)

    def _computed(self, op: Op, sink: Sink) -> tuple[Outcome, int, int]:
        measured, term = Measured(), fold_term(op, self.sources)
        if term is not None:
            blocks = fold(op, term, self.sources, self._workspace, measured)
        else:
            blocks = compute(op, self.sources, measured)
        self._fill(sink, blocks)
        rows, columns = matrix_shape(op.shape)
        outcome = Outcome(
            op.name,
            sink.path.name,
            sink.checksum(),
            nonfinite=measured.nonfinite,
            changed=measured.changed / (rows * columns) if op.terms else None,
            error=measured.error if op.terms else None,
            delta=measured.delta if op.terms else None,
            kept=measured.kept if op.terms else None,
            nearest=measured.nearest if op.terms else None,
        )
        return outcome, op.nbytes, op.nbytes

    def _fill(self, sink: Sink, blocks: Iterable[NDArray[np.uint8]]) -> None:
        for raw in blocks:
            if self._stop.is_set():
                raise _Stopped
            sink.write(raw)
        sink.start_flush()

    @property
    def _workspace(self) -> Workspace:
        """Memory of this thread."""
        if not hasattr(self._of_thread, "workspace"):
            self._of_thread.workspace = Workspace()
        workspace: Workspace = self._of_thread.workspace
        return workspace


def _needs_torch(op: Op, sources: Mapping[str, Source]) -> bool:
    if op.kind == "cast":
        return not casts(op.source_dtype, op.dtype)
    return op.kind == "compute" and fold_term(op, sources) is None


def _memory(op: Op, sources: Mapping[str, Source]) -> int:
    """Return the bytes of memory that an operation takes in addition to its blocks."""
    if op.kind != "compute":
        return 0
    if (term := fold_term(op, sources)) is not None:
        return size_of_a(term, sources)
    count = 2 * prod(op.read_shape) if needs_full_tensor(op) else 0
    names = (name for term in op.terms for name in operands(term))
    return 4 * (count + sum(prod(info_of(name, sources).shape) for name in names))


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
