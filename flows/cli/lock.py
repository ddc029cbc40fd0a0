"""Lock `paths.runs`, so that only one run at a time uses it.

The kernel holds the lock (`flock`) and releases it when the process is gone, `kill -9` included.
The text in the file only tells other processes who holds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

from tasks.core.errors import BusyError
from tasks.core.redaction import redact

POLL_S = 0.2

_locked_here: set[Path] = set()


@contextlib.contextmanager
def hold(
    runs: Path, wait_s: float = 0.0, on_wait: Callable[[str], object] | None = None
) -> Iterator[None]:
    """Lock the folder of runs for this process while the block runs.

    A process that already has the lock enters at once: the command takes it before it starts a
    server, and the flow takes it again, since a Prefect worker has no command.

    Args:
        runs: `paths.runs`; created if it does not exist.
        wait_s: seconds to wait for another run to end.
        on_wait: called once, with the name of the other run, before this one waits.

    Raises:
        BusyError: another process still has the lock after `wait_s` seconds.
    """
    runs = runs.resolve()
    if runs in _locked_here:
        yield
        return
    runs.mkdir(parents=True, exist_ok=True)
    # Opened for appending: a process that only tries must not erase the holder's text.
    with (runs / ".lock").open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + wait_s
        while not _lock(file):
            if time.monotonic() >= deadline:
                raise _busy(runs, file, wait_s)
            if on_wait is not None:
                on_wait(f"waits until {runs} is free, in use by {_holder(file)}")
                on_wait = None
            time.sleep(POLL_S)
        _write(file, json.dumps(_ourselves()))
        _locked_here.add(runs)
        try:
            yield
        finally:
            _locked_here.discard(runs)
            _write(file, "")


def _lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write(file: IO[str], text: str) -> None:
    file.truncate(0)
    file.write(text)
    file.flush()


def _ourselves() -> dict[str, object]:
    command = redact(" ".join(sys.argv))
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"pid": os.getpid(), "command": command, "started": started}


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        holder = json.loads(file.read())
    except ValueError:  # it has just taken the lock, or is about to release it
        return "a process that has not yet written its name"
    return f"pid {holder['pid']}, since {holder['started']}: {holder['command']}"


def _busy(runs: Path, file: IO[str], wait_s: float) -> BusyError:
    waited = f" (waited {wait_s:g} s)" if wait_s else ""
    return BusyError(
        f"{runs} is in use by another run{waited}: {_holder(file)}",
        hint="wait for it with paths.wait_s=600, or run beside it with paths.runs=<other folder>",
    )
