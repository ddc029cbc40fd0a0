"""Files on disk: flush them, and tell whether one may have changed.

Without a flush a rename can survive a power cut, its data not.
"""

from __future__ import annotations

import os
from pathlib import Path


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
