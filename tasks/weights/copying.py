"""Output files and tensors that nothing is computed for: links, kernel copies, casts, hashes."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.errors import ArtifactError
from tasks.weights import bits
from tasks.weights.casts import cast, casts
from tasks.weights.extents import Reader, part, write_at, write_refused
from tasks.weights.header import ITEM_BITS, TensorInfo
from tasks.weights.journal import Outcome
from tasks.weights.plan import Op
from tasks.weights.reader import torch_dtype
from tasks.weights.source import Extent, Source
from tasks.weights.writer import ShardFile

BLOCK = 1 << 21
"""Bytes at a time: a multiple of every item size, and small enough to stay in the cache."""
_FICLONE = 0x40049409
"""ioctl of Linux: make a file share all blocks of another (btrfs, XFS)."""


class StoppedError(Exception):
    """Another worker has failed; this one's work is no longer wanted."""


class Sink:
    """Where one output tensor goes: hashed and written to its offset piece by piece."""

    def __init__(
        self, handle: int, path: Path, info: TensorInfo, stop: threading.Event | None = None
    ) -> None:
        self.handle, self.path, self.info = handle, path, info
        self._stop, self._at = stop, info.start
        self._digest = hashlib.sha256()

    def put(self, raw: Any) -> None:
        """The next bytes. Raises ArtifactError (full disk), StoppedError."""
        if self._stop is not None and self._stop.is_set():
            raise StoppedError
        view = memoryview(raw)
        self._digest.update(view)
        write_at(self.handle, view, self._at, self.path)
        self._at += len(view)

    def sha256(self) -> str:
        """Of the whole tensor. Raises ArtifactError when it is not whole."""
        if self._at != self.info.end:
            done = self._at - self.info.start
            raise ArtifactError(f"{self.path}: {done} of {self.info.nbytes} bytes were written")
        return self._digest.hexdigest()


def link_or_copy(source: Path, target: Path) -> None:
    """Make `target` the same file: sharing blocks, as a hard link, or a copy, whatever works."""
    real = source.resolve()  # the link has to be to the file, not to a symbolic link
    target.unlink(missing_ok=True)
    if _reflink(real, target):
        return
    try:
        os.link(real, target)
    except OSError:
        try:
            shutil.copyfile(real, target)
        except OSError as error:
            raise write_refused(target, error) from error


def prepare_file(path: Path, file: ShardFile) -> tuple[int, bool]:
    """Open an output file with all its space claimed and its header written.

    Returns:
        the open file, and whether it is one that an earlier run had begun just so.

    Raises:
        ArtifactError: no space.
    """
    if _begun(path, file):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), True
    # Never written over: an old file here may be a hard link to an input.
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        # Claims the space now: a full disk is found before hours of work, not after.
        os.posix_fallocate(handle, 0, file.size)
        write_at(handle, memoryview(file.head), 0, path)
    except OSError as error:
        os.close(handle)
        raise write_refused(path, error) from error
    except BaseException:
        os.close(handle)
        raise
    return handle, False


def _begun(path: Path, file: ShardFile) -> bool:
    with contextlib.suppress(OSError), path.open("rb") as found:
        stat = os.fstat(found.fileno())
        alone = stat.st_nlink == 1 and stat.st_size == file.size
        return alone and found.read(len(file.head)) == file.head
    return False


def _reflink(source: Path, target: Path) -> bool:
    try:
        with source.open("rb") as old, target.open("xb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True


def move(op: Op, sources: Mapping[str, Source], sink: Sink, *, scan: bool) -> tuple[Outcome, int]:
    """Copy or cast one tensor.

    Args:
        op: of kind "copy" or "cast".
        sources: the inputs.
        sink: where it goes.
        scan: look at the values even where no hash has to be taken.

    Returns:
        what it came to, and how many bytes were read by this process.
    """
    known = known_hash(op, sources)
    with opened(op, sources) as reader:
        offload = op.kind == "copy" and known is not None and not scan
        if offload and reader.copy_to(sink.handle, sink.info.start):
            return Outcome(op.name, sink.path.name, str(known)), 0
        nonfinite, all_zero = _stream(op, reader, sink)
        found = sink.sha256()
        if op.kind == "copy" and known not in (None, found):
            raise ArtifactError(f"{op.source}: bytes are not those of its manifest")
        return Outcome(op.name, sink.path.name, found, nonfinite, all_zero), reader.nbytes


def _stream(op: Op, reader: Reader, sink: Sink) -> tuple[int, bool]:
    nonfinite, all_zero = 0, True
    buffer: NDArray[np.uint8] = np.empty(min(BLOCK, reader.nbytes), np.uint8)
    for at in range(0, reader.nbytes, BLOCK):
        raw = buffer[: min(BLOCK, reader.nbytes - at)]
        reader.into(raw, at)
        if op.kind == "cast":
            raw = _cast(raw, op.source_dtype, op.dtype)
        nonfinite += bits.nonfinite(raw, op.dtype)
        all_zero = all_zero and bits.all_zero(raw, op.dtype)
        sink.put(raw)
    return nonfinite, all_zero


def _cast(raw: NDArray[np.uint8], source: str, target: str) -> NDArray[np.uint8]:
    if casts(source, target):
        return cast(raw, source, target)
    import torch

    wide = torch.from_numpy(raw).view(torch_dtype(source)).to(torch_dtype(target))
    found: NDArray[np.uint8] = wide.view(torch.uint8).numpy()
    return found


def known_hash(op: Op, sources: Mapping[str, Source]) -> str | None:
    """The source tensor's sha256, where it is known and `op` takes the tensor whole."""
    source = sources[op.input]
    whole = sum(one.nbytes for one in source.extents(op.key))
    return source.sha256(op.key) if source_bytes(op) == whole else None


def source_bytes(op: Op) -> int:
    """How many bytes of its source an operation reads."""
    return prod(op.read_shape) * ITEM_BITS[op.source_dtype] // 8


def opened(op: Op, sources: Mapping[str, Source]) -> Reader:
    """A reader of the bytes that `op` starts from."""
    first = op.start * ITEM_BITS[op.source_dtype] // 8
    return Reader(part(sources[op.input].extents(op.key), first, source_bytes(op)))


def same_contents(path: Path, info: TensorInfo, sha256: str, stop: threading.Event) -> bool:
    """Whether a tensor of an output file has this hash: reads it."""
    digest = hashlib.sha256()
    buffer: NDArray[np.uint8] = np.empty(min(BLOCK, info.nbytes), np.uint8)
    with Reader([Extent(path, info.start, info.nbytes)]) as reader:
        for at in range(0, info.nbytes, BLOCK):
            if stop.is_set():
                raise StoppedError
            raw = buffer[: min(BLOCK, info.nbytes - at)]
            reader.into(raw, at)
            digest.update(raw)
    return digest.hexdigest() == sha256
