"""Locks between the processes that use a folder of runs.

hold      the folder: any number of runs, or one prune alone
staging   one artifact, while it is made
devices   GPUs, or the CPUs of a machine without

The kernel holds all locks (`flock`) and releases them when a process is gone, `kill -9` included.
The library filelock has neither shared locks nor locks of a folder that keeps its lock when it is
renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

from tasks.core.errors import BusyError
from tasks.core.redaction import redact

T = TypeVar("T")

LOCKS = ".locks"
"""Folder of the lock files of devices, in the folder of runs."""
POLL_S = 0.2
HINT = "wait for it: paths.wait_s=null, or run beside it: paths.runs=<other folder>"

_entered: set[Path] = set()


class Needs(Enum):
    """Devices that a stage computes on: GPUs, or the CPUs of a machine without."""

    NOTHING = 0
    DEVICE = 1
    RANKS = 2
    ENGINE = 3


@dataclass(frozen=True)
class Patience:
    """Seconds to wait for other runs, None for as long as it takes; `say` gets the reason once."""

    wait_s: float | None = None
    say: Callable[[str], object] = lambda line: None


FOREVER = Patience()
AT_ONCE = Patience(0.0)
A_MOMENT = Patience(1.0)
"""Another run that sweeps looks into a new staging folder, too."""


@contextlib.contextmanager
def hold(runs: Path, patience: Patience = AT_ONCE, *, alone: bool = False) -> Iterator[None]:
    """Lock a folder of runs for this process while the block runs. Raises BusyError.

    A process that already has the lock enters at once: the command takes it before it starts a
    server, and the flow takes it again, since a Prefect worker has no command.
    """
    runs = runs.resolve()
    if runs in _entered:
        yield
        return
    runs.mkdir(parents=True, exist_ok=True)
    handle = os.open(runs / ".lock", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        _lock(handle, kind, patience, f"{runs} is in use by another run", lambda: _holders(handle))
        me = f"pid {os.getpid()} on {socket.gethostname()}: {redact(' '.join(sys.argv))}\n"
        os.write(handle, me.encode("utf-8", "replace"))
        _entered.add(runs)
        try:
            yield
        finally:
            _entered.remove(runs)
            if _try(handle, fcntl.LOCK_EX):  # the last one clears the names
                os.ftruncate(handle, 0)
    finally:
        os.close(handle)


@contextlib.contextmanager
def devices(runs: Path, names: Iterable[str], patience: Patience) -> Iterator[None]:
    """Lock devices among the runs of a folder while the block runs. Raises BusyError."""
    (runs / LOCKS).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for name in sorted(names):  # in one order, so that two runs never wait for each other
            handle = os.open(runs / LOCKS / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, handle)
            _lock(handle, fcntl.LOCK_EX, patience, f"{name} is in use by another run")
        yield


@contextlib.contextmanager
def staging(final: Path, patience: Patience = A_MOMENT) -> Iterator[Path]:
    """Yield a private, empty directory beside `final` to write into. Raises BusyError.

    Its name comes from that of the artifact, so that the next run for the same artifact clears the
    folder of a killed run. It is removed at the end, unless `publish` has renamed it.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    work = final.parent / f".{final.name}.tmp"
    handle = _wait(lambda: _own(work), patience, f"{final} is being made by another run")
    try:
        for path in work.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        yield work
    finally:
        if _is_still(work, handle):
            shutil.rmtree(work, ignore_errors=True)
        os.close(handle)


def sweep(root: Path) -> None:
    """Remove the staging directories below `root/<kind>` whose process is gone."""
    for work in abandoned(root.glob("*/.*.tmp")):
        shutil.rmtree(work, ignore_errors=True)


def abandoned(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the staging directories whose process is gone; each is locked while it is yielded."""
    for work in folders:
        try:
            handle = _open_folder(work)
        except OSError:
            continue  # just published or removed by its owner
        try:
            if _try(handle):
                yield work
        finally:
            os.close(handle)


def _own(work: Path) -> int | None:
    """Create a folder if it does not exist, and lock it. Returns its file descriptor."""
    work.mkdir(exist_ok=True)
    try:
        handle = _open_folder(work)
    except FileNotFoundError:
        return None  # its owner has just published it
    if _try(handle) and _is_still(work, handle):
        return handle
    os.close(handle)
    return None


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _is_still(work: Path, handle: int) -> bool:
    """Return True if the path still leads to the open folder; False after a rename."""
    try:
        at_path, opened = work.stat(), os.fstat(handle)
    except OSError:
        return False
    return (at_path.st_dev, at_path.st_ino) == (opened.st_dev, opened.st_ino)


def _lock(
    handle: int, kind: int, patience: Patience, what: str, who: Callable[[], str] = str
) -> None:
    _wait(lambda: _try(handle, kind) or None, patience, what, who)


def _wait(
    attempt: Callable[[], T | None], patience: Patience, what: str, who: Callable[[], str] = str
) -> T:
    """Repeat an attempt until it returns a value. Raises BusyError when the time is over."""
    begun, told = time.monotonic(), False
    while (taken := attempt()) is None:
        if patience.wait_s is not None and time.monotonic() - begun >= patience.wait_s:
            raise BusyError(f"{what} (waited {patience.wait_s:g} s){who()}", hint=HINT)
        if not told:
            patience.say(f"waits: {what}{who()}")
        told = True
        time.sleep(POLL_S)
    return taken


def _try(handle: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holders(handle: int) -> str:
    """Return who has the folder, by the lines that they have written into its lock file."""
    lines = os.pread(handle, 1 << 20, 0).decode(errors="replace").splitlines()
    here = f" on {socket.gethostname()}:"
    alive = [line for line in lines if here not in line or Path("/proc", line.split()[1]).exists()]
    return f": {'; '.join(alive)}"
