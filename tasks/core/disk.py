"""Files on disk: flush them, tell whether one may have changed, and report a full disk.

Without a flush a rename can survive a power cut, its data not.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.core.errors import ArtifactError

SPACE_HINT = "free some space, or put the runs elsewhere: paths.runs=/big/disk/runs"
_SIZE_HINT = "ulimit -f unlimited; or another file system: paths.runs=/big/disk/runs"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def flush(path: Path) -> None:
    """Write a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_stats(path: Path) -> list[int]:
    """Return size, mtime, ctime and inode of a file: if all are the same, its bytes are, too.

    A process that alters a file can restore its mtime, but not its ctime.
    """
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def flush_tree(root: Path) -> None:
    """Write all files and folders below a folder to disk, and the folder itself."""
    for path in (root, *root.rglob("*")):
        flush(path)


def write_refused(path: Path, error: OSError) -> ArtifactError:
    """Return the ArtifactError for a write that the operating system refused."""
    message = f"{path}: cannot write: {error.strerror or error}"
    if is_full(error):
        message += f"; {_free(path) / 1e9:.2f} GB are free there"
    return ArtifactError(message, hint=_SIZE_HINT if error.errno == errno.EFBIG else SPACE_HINT)


def is_full(error: BaseException | None) -> bool:
    """Return True for the error of a full disk, a used-up quota or a limit on file sizes."""
    return isinstance(error, OSError) and error.errno in _NO_SPACE


def has_no_space(path: Path) -> bool:
    """Return True if the disk of a path, which may not exist yet, has less than a MB free."""
    return _free(path) < 1e6


def _free(path: Path) -> int:
    there = next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(there).free


def full_disk(error: Exception, runs: Path) -> ArtifactError | None:
    """Return the error of a full disk; None if the disk of `runs` is not full.

    The databases of Prefect and MLflow hide a full disk behind errors of their own.
    """
    if not is_full(error) and not has_no_space(runs):
        return None
    place = Path(getattr(error, "filename", None) or runs)
    return write_refused(place, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))


@contextmanager
def disk_full_named(folder: Path) -> Iterator[None]:
    """Turn the OSError of a full disk into an ArtifactError that names the file, or the folder."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise write_refused(Path(error.filename or folder), error) from error
        raise
