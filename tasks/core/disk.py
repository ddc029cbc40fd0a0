"""Flush files and folders to disk: without it a rename can survive a power cut, its data not."""

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


def flush_tree(root: Path) -> None:
    """Write all files and folders below a folder to disk, and the folder itself."""
    for path in (root, *root.rglob("*")):
        flush(path)
