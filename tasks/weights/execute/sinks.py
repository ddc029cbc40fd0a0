"""Where output tensors go: files whose space is claimed at once, and tensors piece by piece."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError
from tasks.weights.execute.writer import ShardFile
from tasks.weights.files.file_ranges import write_at, write_refused
from tasks.weights.files.header import TensorInfo
from tasks.weights.native.hashing import stream


class Sink:
    """Where one output tensor goes: written to its offset piece by piece.

    Attributes:
        handle: the open file. path: its name.
        info: where in it the tensor lies.
        stream: the hash of what is written; whoever writes a piece advances it.
    """

    def __init__(self, handle: int, path: Path, info: TensorInfo) -> None:
        self.handle, self.path, self.info = handle, path, info
        self.stream = stream()
        self._at = info.start

    def write(self, raw: NDArray[np.uint8]) -> None:
        """The next bytes. Raises ArtifactError (full disk)."""
        write_at(self.handle, memoryview(raw), self._at, self.path)
        self._at += raw.size

    def start_flush(self) -> None:
        """Have the kernel begin to write the tensor to disk, so that the flush at the end is short.

        It is advice that nobody needs the pages; dirty ones are not dropped but written.
        """
        os.posix_fadvise(self.handle, self.info.start, self.info.nbytes, os.POSIX_FADV_DONTNEED)

    @property
    def complete(self) -> bool:
        """Whether the whole tensor is written."""
        return self._at == self.info.end

    def sha256(self) -> str:
        """Of the whole tensor. Raises ArtifactError when it is not whole."""
        if not self.complete:
            done = self._at - self.info.start
            raise ArtifactError(f"{self.path}: {done} of {self.info.nbytes} bytes were written")
        return self.stream.hexdigest()


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
