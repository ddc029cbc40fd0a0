"""Tensors as ranges of files, whatever the format of the files, and a reader of ranges.

A safetensors folder, the partitions of ranks, a DeepSpeed checkpoint and a pickled state dict are
all opened as `Tensors`. So one engine reads them all, and never loads one as a whole.

Ranges are read with `pread`, never with `mmap`: mapped pages count as memory of the process, and a
file that shrinks under a mapping kills the process with SIGBUS; a short `pread` can be reported.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.core.files import write_refused

_STEP = 16 << 20
"""Bytes per system call: large enough to be fast, small enough to react to a signal."""
_NO_OFFLOAD = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""Errors of `copy_file_range` if kernel or file system cannot do it; the caller then reads."""


@dataclass(frozen=True)
class Extent:
    """A range of a file: `nbytes` bytes from byte `start` on."""

    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class Tensor:
    """A tensor in files: shape, dtype (safetensors name), and its byte ranges in C order.

    A tensor of a pickle whose elements are not in order has no ranges. A quantized matrix is shown
    decoded: `packed` is how to decode its ranges (`Op.packed`).
    """

    shape: tuple[int, ...]
    dtype: str
    extents: tuple[Extent, ...] = ()
    hash: str | None = None  # BLAKE3 of its bytes, if an intact manifest states it
    packed: Mapping[str, Any] | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in the files, in bytes."""
        return sum(extent.nbytes for extent in self.extents)


Tensors = Mapping[str, Tensor]
"""Tensors by key, whatever the format of their files; all readers return them."""
Sources = Mapping[str, Tensors]
"""Inputs of a plan by name."""


def size_of(tensors: Tensors) -> int:
    """Return the size of all tensors in bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def tensor_of(name: str, sources: Sources) -> Tensor:
    """Return the tensor "<input>:<key>", which must exist."""
    source, _, key = name.partition(":")
    return sources[source][key]


def find(name: str, sources: Sources) -> Tensor | str:
    """Return the tensor "<input>:<key>"; or, if there is none, a text that says why."""
    source, _, key = name.partition(":")
    if source not in sources:
        return f"{name}: no input {source!r} (inputs: {', '.join(sources) or 'none'})"
    return sources[source].get(key, f"{source} has no {key}")


def part(extents: Sequence[Extent], start: int, nbytes: int) -> list[Extent]:
    """Return the extents that make a range of bytes, counted from the start of the first one."""
    parts, at, end = [], 0, start + nbytes
    for extent in extents:
        low, high = max(start, at), min(end, at + extent.nbytes)
        if low < high:
            parts.append(Extent(extent.path, extent.start + low - at, high - low))
        at += extent.nbytes
    return parts


class Reader:
    """Concatenated extents as one stream that is read by offset; a context manager.

    Raises ArtifactError if a file cannot be opened, or is shorter than its header says.
    """

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._extents = extents
        self._handles: dict[Path, int] = {}
        self.nbytes = sum(extent.nbytes for extent in extents)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def into(self, target: Any, at: int) -> None:
        """Fill a writable buffer with the bytes of the stream from offset `at` on."""
        view = memoryview(target)
        if at + len(view) > self.nbytes:
            raise ArtifactError(f"cannot read {len(view)} bytes at {at}: only {self.nbytes} exist")
        for extent in part(self._extents, at, len(view)):
            piece, view, offset = view[: extent.nbytes], view[extent.nbytes :], extent.start
            while piece:
                try:
                    done = os.preadv(self._handle(extent.path), [piece[:_STEP]], offset)
                except OSError as error:
                    raise _unreadable(extent.path, error) from error
                if not done:
                    raise _short(extent.path)
                piece, offset = piece[done:], offset + done

    def read(self, at: int = 0, nbytes: int | None = None) -> NDArray[np.uint8]:
        """Return bytes of the stream in new memory: `nbytes` from offset `at` on; None for all."""
        raw: NDArray[np.uint8] = np.empty(self.nbytes if nbytes is None else nbytes, np.uint8)
        self.into(raw, at)
        return raw

    def copy_to(self, target: int, to: int) -> bool:
        """Let the kernel copy the whole stream into an open file, from offset `to` on.

        Returns False if kernel or file system cannot do it; part of the target may be written then.
        """
        for extent in self._extents:
            handle, left, offset = self._handle(extent.path), extent.nbytes, extent.start
            while left:
                try:
                    done = os.copy_file_range(handle, target, min(left, _STEP), offset, to)
                except OSError as error:
                    if error.errno in _NO_OFFLOAD:
                        return False
                    raise write_refused(extent.path, error) from error
                if not done:
                    raise _short(extent.path)
                left, offset, to = left - done, offset + done, to + done
        return True

    def _handle(self, path: Path) -> int:
        if path not in self._handles:
            try:
                self._handles[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise _unreadable(path, error) from error
        return self._handles[path]


def read_all(tensor: Tensor) -> NDArray[np.uint8]:
    """Return all bytes of a tensor."""
    with Reader(tensor.extents) as reader:
        return reader.read()


def write_at(handle: int, view: memoryview, at: int, path: Path) -> None:
    """Write a buffer at an offset of an open file. Raises ArtifactError if it is refused."""
    try:
        while view:
            done = os.pwrite(handle, view, at)
            at, view = at + done, view[done:]
    except OSError as error:
        raise write_refused(path, error) from error


def _unreadable(path: Path, error: OSError) -> ArtifactError:
    return ArtifactError(f"{path}: cannot be read: {error.strerror}")


def _short(path: Path) -> ArtifactError:
    return ArtifactError(f"{path}: became shorter while it was read")
