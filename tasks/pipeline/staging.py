"""Staging folder of an artifact: hidden, beside its final place, for one process at a time.

Its name comes from the artifact's key, so the next run for the same artifact finds the folder of a
killed run. It continues from there if the folder has a journal
(`tasks/weights/execute/journal.py`); all other files are made again. The owner locks the folder
itself (`flock`); the kernel releases the lock with the process, and a rename keeps it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from tasks.core.errors import (
    BusyError,
    ConfigError,
    ContractError,
    DataError,
    DriftError,
)
from tasks.weights.execute.journal import JOURNAL

KEPT_S = 3 * 24 * 3600.0
"""Seconds for which an abandoned folder with a journal is kept."""
SWEEP_S = 1.0
"""Seconds to try: another run that sweeps looks into a new folder, too."""
_VERDICTS = (ConfigError, ContractError, DataError, DriftError)
"""Errors that the same inputs would cause again, so that the folder is of no use."""


@contextlib.contextmanager
def staging(final: Path) -> Iterator[Path]:
    """Yield a private directory beside `final` to write into.

    It is removed at the end, unless `publish` has renamed it, or the run was interrupted and the
    directory has a journal of finished tensors for the next run.

    Raises:
        BusyError: another process is making the same artifact.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    work = final.parent / f".{final.name}.tmp"
    handle = _own(work, final)
    keep = False
    try:
        _clear(work)
        try:
            yield work
        except BaseException as error:
            keep = (work / JOURNAL).exists() and not isinstance(error, _VERDICTS)
            raise
    finally:
        if not keep and _is_still(work, handle):
            shutil.rmtree(work, ignore_errors=True)
        os.close(handle)


def sweep(root: Path, now: float | None = None) -> list[Path]:
    """Remove staging directories whose process is gone, see `abandoned`. Returns them."""
    removed = []
    for work in abandoned(root, now):
        shutil.rmtree(work, ignore_errors=True)
        removed.append(work)
    return removed


def abandoned(root: Path, now: float | None = None) -> Iterator[Path]:
    """Yield staging directories whose process is gone; each is locked while it is yielded.

    A directory with a journal is kept for `KEPT_S` seconds, unless its artifact has been published
    since.

    Args:
        root: folder of the artifacts.
        now: seconds since the epoch; None for the current time.
    """
    for work in root.glob("*/.*.tmp"):
        try:
            handle = os.open(work, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # just published or removed by its owner
        try:
            if _locked(handle) and not _worth_keeping(work, now or time.time()):
                yield work
        finally:
            os.close(handle)


def _worth_keeping(work: Path, now: float) -> bool:
    final = work.parent / work.name.removeprefix(".").removesuffix(".tmp")
    try:
        age = now - (work / JOURNAL).stat().st_mtime
    except OSError:
        return False
    return age < KEPT_S and not final.exists()


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
    """Remove all files except the journal of an earlier run and the tensors that it lists."""
    resumable = (work / JOURNAL).exists()
    for path in work.iterdir():
        if resumable and (path.name == JOURNAL or path.suffix == ".safetensors"):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
