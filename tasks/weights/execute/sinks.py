"""Output files whose disk space is allocated up front, and the tensors written into them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from tasks.core.disk import write_refused
from tasks.core.errors import ArtifactError
from tasks.weights.execute.writer import ShardFile
from tasks.weights.files.file_ranges import write_at
from tasks.weights.files.header import TensorInfo


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


def prepare_file(path: Path, file: ShardFile) -> tuple[int, bool]:
    """Open an output file, allocate all its space and write its header.

    Returns:
        The file descriptor, and True if an earlier run had begun exactly this file.

    Raises:
        ArtifactError: the disk has too little space.
    """
    if _begun(path, file):
        return os.open(path, os.O_RDWR | os.O_CLOEXEC), True
    # Replaced, never overwritten: an old file may be a hard link to an input.
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        # Allocates the space now: a full disk is noticed before hours of work, not after.
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
    with contextlib.suppress(OSError), path.open("rb") as existing:
        stat = os.fstat(existing.fileno())
        own = stat.st_nlink == 1 and stat.st_size == file.size
        return own and existing.read(len(file.head)) == file.head
    return False
