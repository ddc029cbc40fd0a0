"""Locks of a folder of runs: of the whole folder, of one artifact, of one device.

Runs share a folder. `hold` lets any number of them in; who needs it alone (a prune, a run that
starts its servers) gets it while nobody else is in. While a run makes an artifact it owns that one,
and it shares what it has made or reused until it ends (`reuse_or_own`, `share`), so that no other
run replaces a file that this one still reads.

The kernel holds all locks (`flock`) and releases them when a process is gone, `kill -9` included.
The text in a file only tells other processes who holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import psutil

from tasks.core.errors import BusyError
from tasks.core.redaction import redact

T = TypeVar("T")

LOCKS = ".locks"
"""Folder of the lock files of artifacts and devices, in the folder of runs."""
POLL_S = 0.2
HINT = "wait for it: paths.wait_s=null, or run beside it: paths.runs=<other folder>"

_artifacts: dict[Path, int] = {}
_held: dict[Path, Hold] = {}


class Needs(Enum):
    """Devices that a stage computes on: GPUs, or the CPUs of a machine without."""

    NOTHING = 0
    DEVICE = 1
    RANKS = 2
    ENGINE = 3


@dataclass(frozen=True)
class Patience:
    """Time to wait for other runs.

    Attributes:
        wait_s: seconds; None for as long as it takes.
        say: called once before waiting, with a line about the reason.
    """

    wait_s: float | None = None
    say: Callable[[str], object] = lambda line: None


FOREVER = Patience()
AT_ONCE = Patience(0.0)


@dataclass
class Hold:
    """Lock of a folder of runs.

    Attributes:
        alone: True while no other process is in the folder.
    """

    alone: bool
    _runs: Path
    _handle: int

    def clear(self) -> None:
        """Remove the lock files of artifacts, of which many may be gone."""
        assert self.alone, "another run may just have opened one of them"
        for path in (self._runs / LOCKS).glob("*"):
            path.unlink()

    def share(self) -> None:
        """Let other runs in, after the work that needs the folder alone."""
        if self.alone:
            fcntl.flock(self._handle, fcntl.LOCK_SH)
            self.alone = False


@contextlib.contextmanager
def hold(runs: Path, patience: Patience = AT_ONCE, *, alone: bool = False) -> Iterator[Hold]:
    """Lock a folder of runs for this process while the block runs.

    A process that already has the lock enters at once: the command takes it before it starts a
    server, and the flow takes it again, since a Prefect worker has no command.

    Args:
        runs: `paths.runs`; created if it does not exist.
        alone: True to wait until no other process is in the folder. Otherwise the lock is shared,
            and the first process to come is alone until it calls `share`.

    Raises:
        BusyError: other processes still have the folder.
    """
    runs = runs.resolve()
    if runs in _held:
        yield _held[runs]
        return
    runs.mkdir(parents=True, exist_ok=True)
    handle = os.open(runs / ".lock", os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        kinds = [fcntl.LOCK_EX] if alone else [fcntl.LOCK_EX, fcntl.LOCK_SH]
        what = f"{runs} is in use by another run"
        kind = _lock(handle, kinds, patience, what, lambda: _holders(handle))
        if kind == fcntl.LOCK_EX:
            os.ftruncate(handle, 0)
        os.write(handle, (json.dumps(_ourselves()) + "\n").encode())
        _held[runs] = Hold(kind == fcntl.LOCK_EX, runs, handle)
        try:
            yield _held[runs]
        finally:
            del _held[runs]
            release()
            if _try(handle, fcntl.LOCK_EX):  # the last one clears the names
                os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def share(final: Path, patience: Patience) -> None:
    """Wait until no other run makes an artifact; it is not replaced until `release`.

    Args:
        final: the artifact's folder, which need not exist.

    Raises:
        BusyError: another run still makes it.
    """
    what = f"{final} is being made by another run"
    _lock(_handle_of(final), [fcntl.LOCK_SH], patience, what)


def reuse_or_own(final: Path, find: Callable[[], T | None] | None, patience: Patience) -> T | None:
    """Return a finished artifact, or own it to make it; whoever made it calls `share` then.

    Args:
        final: the artifact's folder, which need not exist.
        find: returns the artifact if it can be reused; None to make it in any case.
        patience: how long to wait while another run makes the artifact. One that has to be replaced
            must not be in use by another run either.

    Returns:
        The artifact; None if this run owns it now.

    Raises:
        BusyError: another run still makes or uses it.
    """
    if find is not None:
        share(final, patience)
        if (artifact := find()) is not None:
            return artifact
    waits: list[str] = []

    def say(line: str) -> None:
        waits.append(line)
        patience.say(line)

    what = f"{final} is being made or used by another run"
    _lock(_handle_of(final), [fcntl.LOCK_EX], Patience(patience.wait_s, say), what)
    if waits and find is not None and (artifact := find()) is not None:
        share(final, patience)  # the other run has made it
        return artifact
    return None


def release() -> None:
    """Release the artifacts that this process has made or used."""
    while _artifacts:
        os.close(_artifacts.popitem()[1])


@contextlib.contextmanager
def devices(runs: Path, names: Iterable[str], patience: Patience) -> Iterator[None]:
    """Lock devices of this machine among the runs of a folder while the block runs.

    Args:
        runs: `paths.runs`.

    Raises:
        BusyError: another run still uses one of them.
    """
    folder = runs / LOCKS
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for name in sorted(names):  # in one order, so that two runs never wait for each other
            handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            stack.callback(os.close, handle)
            _lock(handle, [fcntl.LOCK_EX], patience, f"{name} is in use by another run")
        yield


def _handle_of(final: Path) -> int:
    """Return the file descriptor of an artifact's lock; a process has one for each artifact."""
    path = final.parents[2] / LOCKS / f"{final.parent.name}.{final.name}"
    if path not in _artifacts:
        path.parent.mkdir(parents=True, exist_ok=True)
        _artifacts[path] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    return _artifacts[path]


def _lock(
    handle: int,
    kinds: list[int],
    patience: Patience,
    what: str,
    by: Callable[[], str] = lambda: "",
) -> int:
    """Take the first of these locks that is free; returns it. Raises BusyError."""
    begun = time.monotonic()
    told = False
    while True:
        for kind in kinds:
            if _try(handle, kind):
                return kind
        who = f": {by()}" if by() else ""
        if patience.wait_s is not None and time.monotonic() - begun >= patience.wait_s:
            waited = f" (waited {patience.wait_s:g} s)" if patience.wait_s else ""
            raise BusyError(f"{what}{waited}{who}", hint=HINT)
        if not told:
            patience.say(f"waits: {what}{who}")
        told = True
        time.sleep(POLL_S)


def _try(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _ourselves() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": redact(" ".join(sys.argv)),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _holders(handle: int) -> str:
    """Return who has the folder, by the lines that they have written into its lock file."""
    holders = []
    for line in os.pread(handle, 1 << 20, 0).decode(errors="replace").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            holder = json.loads(line)
            here = holder["host"] == socket.gethostname()
            if not here or psutil.pid_exists(holder["pid"]):
                where = "" if here else f" on {holder['host']}"
                who = f"pid {holder['pid']}{where}, since {holder['started']}: {holder['command']}"
                holders.append(who)
    return "; ".join(holders) or "a process that has not yet written its name"
