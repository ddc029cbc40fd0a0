"""Files and tensors that nothing is computed for: links, kernel copies, casts, known hashes."""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.weights.execute.journal import Outcome
from tasks.weights.execute.sinks import Sink
from tasks.weights.files import dtype_bits as bits
from tasks.weights.files.dtype_conversion import cast, casts
from tasks.weights.files.file_ranges import Reader, part, write_refused
from tasks.weights.files.header import ITEM_BITS, TensorInfo
from tasks.weights.files.reader import torch_dtype
from tasks.weights.files.source import Extent, Source
from tasks.weights.plan.operations import Op

BLOCK = 1 << 20
"""Bytes at a time: a multiple of every item size, and small enough to stay in the cache."""
_FICLONE = 0x40049409
"""ioctl of Linux: make a file share all blocks of another (btrfs, XFS)."""


def pages(nbytes: int) -> NDArray[np.uint8]:
    """So many bytes of zeros, aligned to a page; the system has them back with the last view."""
    found: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)
    return found[:nbytes]


class Buffer:
    """One piece of memory that grows to the largest size asked for."""

    def __init__(self) -> None:
        self._held: NDArray[np.uint8] = np.empty(0, np.uint8)

    @property
    def size(self) -> int:
        """Bytes held."""
        return self._held.size

    def first(self, nbytes: int) -> NDArray[np.uint8]:
        """Its first `nbytes`; overwrites what the last call gave."""
        if self._held.size < nbytes:
            self._held = pages(nbytes)
        return self._held[:nbytes]


class Workspace:
    """What one tensor in the making works in.

    Attributes:
        read: the worker's, shared by its tensors: holds nothing from one block to the next.
        out: the tensor's own: what it needs from one block to the next, and the block itself, which
            waits there until those of the others are made.
    """

    def __init__(self, read: Buffer) -> None:
        self.read, self.out = read, Buffer()


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


def _reflink(source: Path, target: Path) -> bool:
    try:
        with source.open("rb") as old, target.open("xb") as new:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
    except OSError:
        target.unlink(missing_ok=True)
        return False
    return True


def offload(op: Op, sources: Mapping[str, Source], sink: Sink) -> Outcome | None:
    """Have the kernel copy a tensor whose hash is known.

    Returns:
        None where it is not known, or the kernel cannot: then the bytes have to be read.
    """
    known = known_hash(op, sources)
    if op.kind != "copy" or known is None:
        return None
    with opened(op, sources) as reader:
        if not reader.copy_to(sink.handle, sink.info.start):
            return None
    return Outcome(op.name, sink.path.name, known)


def move(
    op: Op, sources: Mapping[str, Source], room: Workspace, seen: Seen
) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor that is copied or cast, block by block.

    Args:
        op: of kind "copy" or "cast".
        sources: the inputs.
        room: memory to work in.
        seen: what is noticed on the way.

    Yields:
        the next bytes of the output, good until the next ones are asked for.
    """
    casting = op.kind == "cast"
    with opened(op, sources) as reader:
        for at in range(0, reader.nbytes, BLOCK):
            size = min(BLOCK, reader.nbytes - at)
            raw = (room.read if casting else room.out).first(size)
            reader.into(raw, at)
            seen.read += size
            if casting:
                raw = _cast(raw, op, room.out)
            seen.nonfinite += bits.nonfinite(raw, op.dtype)
            seen.all_zero = seen.all_zero and bits.all_zero(raw, op.dtype)
            yield raw


@dataclass
class Seen:
    """Of the values that passed: bytes read, how many are not finite, whether all are zero."""

    read: int = 0
    nonfinite: int = 0
    all_zero: bool = True


def _cast(raw: NDArray[np.uint8], op: Op, target: Buffer) -> NDArray[np.uint8]:
    source, goal = op.source_dtype, op.dtype
    if casts(source, goal):
        count = raw.size * 8 // ITEM_BITS[source]
        return cast(raw, source, goal, target.first(count * ITEM_BITS[goal] // 8))
    import torch

    wide = torch.from_numpy(raw).view(torch_dtype(source)).to(torch_dtype(goal))
    found: NDArray[np.uint8] = wide.view(torch.uint8).numpy()
    return found


def known_hash(op: Op, sources: Mapping[str, Source]) -> str | None:
    """The source tensor's sha256, where it is known and `op` takes the tensor whole."""
    source = sources[op.input]
    whole = sum(one.nbytes for one in source.extents(op.key))
    return source.sha256(op.key) if source_bytes(op) == whole else None


def same_as_known(op: Op, sources: Mapping[str, Source], found: str) -> str:
    """`found`, the hash of the copied bytes. Raises ArtifactError where a manifest says another."""
    if op.kind == "copy" and known_hash(op, sources) not in (None, found):
        raise ArtifactError(f"{op.source}: bytes are not those of its manifest")
    return found


def source_bytes(op: Op) -> int:
    """How many bytes of its source an operation reads."""
    return prod(op.read_shape) * ITEM_BITS[op.source_dtype] // 8


def opened(op: Op, sources: Mapping[str, Source]) -> Reader:
    """A reader of the bytes that `op` starts from."""
    first = op.start * ITEM_BITS[op.source_dtype] // 8
    return Reader(part(sources[op.input].extents(op.key), first, source_bytes(op)))


def contents(path: Path, info: TensorInfo, room: Workspace) -> Iterator[NDArray[np.uint8]]:
    """The bytes of a tensor of an output file, block by block."""
    with Reader([Extent(path, info.start, info.nbytes)]) as reader:
        for at in range(0, info.nbytes, BLOCK):
            raw = room.out.first(min(BLOCK, info.nbytes - at))
            reader.into(raw, at)
            yield raw
