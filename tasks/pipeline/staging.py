"""Staging folder of an artifact: hidden, beside its final place, for one process at a time.

Its name comes from the artifact's key, so the next run for the same artifact clears the folder of a
killed run. The owner locks the folder itself (`flock`); the kernel releases the lock with the
process, and a rename keeps it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tasks.core.errors import BusyError

SWEEP_S = 1.0
"""Seconds to try: another run that sweeps looks into a new folder, too."""


@contextlib.contextmanager
def staging(final: Path) -> Iterator[Path]:
    """Yield a private directory beside `final` to write into.

    It is removed at the end, unless `publish` has renamed it.

    Raises:
        BusyError: another process is making the same artifact.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    work = final.parent / f".{final.name}.tmp"
    handle = _own(work, final)
    try:
        _clear(work)
        yield work
    finally:
        if _is_still(work, handle):
            shutil.rmtree(work, ignore_errors=True)
        os.close(handle)


def sweep(root: Path) -> list[Path]:
    """Remove staging directories whose process is gone. Returns them."""
    removed = []
    for work in abandoned(root):
        shutil.rmtree(work, ignore_errors=True)
        removed.append(work)
    return removed


def abandoned(root: Path) -> Iterator[Path]:
    """Yield staging directories whose process is gone; each is locked while it is yielded."""
    for work in root.glob("*/.*.tmp"):
        try:
            handle = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # just published or removed by its owner
        try:
            if _locked(handle):
                yield work
        finally:
            os.close(handle)


def _own(work: Path, final: Path) -> int:
    """Create `work` if it does not exist, lock it and return its file descriptor."""
    deadline = time.monotonic() + SWEEP_S
    while True:
        work.mkdir(exist_ok=True)
        try:
            handle = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its owner has just published it
        if not _locked(handle):
            os.close(handle)
            if time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            raise BusyError(
                f"{final} is being made by another process",
                hint="wait for it, or run beside it with paths.runs=<other folder>",
            )
        if _is_still(work, handle):
            return handle
        os.close(handle)


def _locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(work: Path, handle: int) -> bool:
    """Return True if the path still leads to the open folder; False after a rename."""
    try:
        at_path, opened = work.stat(), os.fstat(handle)
    except OSError:
        return False
    return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)


def _clear(work: Path) -> None:
    """Remove what a killed run has left."""
    for path in work.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
