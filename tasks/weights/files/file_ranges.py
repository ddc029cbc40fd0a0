"""Reading and copying ranges of files: `pread` into buffers that are used again, never `mmap`.

Mapped pages count as memory of the process, and a file that shrinks under a mapping kills it with
SIGBUS; a short `pread` is an error that can be told.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from tasks.core.errors import ArtifactError
from tasks.weights.execute.writer import SPACE_HINT
from tasks.weights.files.source import Extent

_STEP = 16 << 20
"""Bytes a system call: large enough to cost nothing, small enough to stop soon when told to."""
_NO_OFFLOAD = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}
"""What `copy_file_range` says where kernel or file system cannot do it; the caller reads then."""


def part(extents: Sequence[Extent], start: int, nbytes: int) -> list[Extent]:
    """Bytes `[start, start + nbytes)` of the run that `extents` make."""
    found, at, end = [], 0, start + nbytes
    for one in extents:
        low, high = max(start, at), min(end, at + one.nbytes)
        if low < high:
            found.append(Extent(one.path, one.start + low - at, high - low))
        at += one.nbytes
    return found


class Reader:
    """A run of extents as one stream that is read by offset; a context manager.

    Raises:
        ArtifactError: a file that cannot be opened or is shorter than its header said.
    """

    def __init__(self, extents: Sequence[Extent]) -> None:
        self._extents = list(extents)
        self._starts = [0, *accumulate(one.nbytes for one in self._extents)]
        self._handles: dict[Path, int] = {}

    @property
    def nbytes(self) -> int:
        """Length of the stream."""
        return self._starts[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def into(self, target: Any, at: int) -> None:
        """Fill `target`, anything with a writable buffer of bytes, with the bytes from `at` on."""
        view = memoryview(target)
        if at + len(view) > self.nbytes:
            raise ArtifactError(f"{len(view)} bytes asked for at {at} of {self.nbytes}")
        for one, offset, low, high in self._pieces(at, len(view)):
            piece = view[low:high]
            while piece:
                done = self._pread(one.path, piece, offset)
                piece, offset = piece[done:], offset + done

    def copy_to(self, target: int, to: int) -> bool:
        """Have the kernel copy the whole stream to offset `to` of the open file `target`.

        Returns:
            False when kernel or file system cannot; nothing is promised about the target then.
        """
        for one, offset, low, high in self._pieces(0, self.nbytes):
            left, goal = high - low, to + low
            while left:
                try:
                    handle = self._handle(one.path)
                    done = os.copy_file_range(handle, target, min(left, _STEP), offset, goal)
                except OSError as error:
                    if error.errno in _NO_OFFLOAD:
                        return False
                    raise write_refused(one.path, error) from error
                if not done:
                    raise _short(one.path)
                left, offset, goal = left - done, offset + done, goal + done
        return True

    def _pieces(self, at: int, length: int) -> Iterator[tuple[Extent, int, int, int]]:
        """(extent, its file offset, begin and end within the asked range) of every part touched."""
        end = at + length
        for index in range(max(0, bisect_right(self._starts, at) - 1), len(self._extents)):
            one, first = self._extents[index], self._starts[index]
            low, high = max(at, first), min(end, first + one.nbytes)
            if first >= end:
                return
            if low < high:
                yield one, one.start + low - first, low - at, high - at

    def _pread(self, path: Path, piece: memoryview, offset: int) -> int:
        try:
            done = os.preadv(self._handle(path), [piece[:_STEP]], offset)
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
        if not done:
            raise _short(path)
        return done

    def _handle(self, path: Path) -> int:
        if path not in self._handles:
            try:
                self._handles[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
        return self._handles[path]


def write_at(handle: int, view: memoryview, at: int, path: Path) -> None:
    """Write all of `view` at offset `at`. Raises ArtifactError with the system's reason."""
    try:
        while view:
            done = os.pwrite(handle, view, at)
            at, view = at + done, view[done:]
    except OSError as error:
        raise write_refused(path, error) from error


def write_refused(path: Path, error: OSError) -> ArtifactError:
    """The operating system's refusal to write, as an error that says what to do."""
    return ArtifactError(f"{path}: cannot write: {error.strerror or error}", hint=SPACE_HINT)


def _short(path: Path) -> ArtifactError:
    return ArtifactError(f"{path}: shorter than it was a moment ago")
