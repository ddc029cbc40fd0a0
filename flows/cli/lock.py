"""One run at a time in one `paths.runs`.

The lock is the kernel's (`flock`): it is free as soon as its holder is gone, `kill -9` included.
What is written in the file only tells others who that is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

from tasks.core.errors import BusyError

POLL_S = 0.2

_held: set[Path] = set()


@contextlib.contextmanager
def hold(runs: Path, wait_s: float = 0.0) -> Iterator[None]:
    """Hold the folder of runs for this process while the block runs.

    A process that holds it already goes straight on: the command line takes it before it starts a
    server, and the flow's body takes it too, since under a Prefect worker there is no command line.

    Args:
        runs: `paths.runs`; made if it is not there.
        wait_s: how long to wait for another run to end.

    Raises:
        BusyError: another process still holds it after `wait_s` seconds.
    """
    runs = runs.resolve()
    if runs in _held:
        yield
        return
    runs.mkdir(parents=True, exist_ok=True)
    # Opened for appending: the holder's words must survive those who only try.
    with (runs / ".lock").open("a+", encoding="utf-8") as file:
        deadline = time.monotonic() + wait_s
        while not _taken(file):
            if time.monotonic() >= deadline:
                raise _busy(runs, file, wait_s)
            time.sleep(POLL_S)
        _write(file, json.dumps(_ourselves()))
        _held.add(runs)
        try:
            yield
        finally:
            _held.discard(runs)
            _write(file, "")


def _taken(file: IO[str]) -> bool:
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
    command = re.sub(r"://[^/@\s]+@", "://***@", " ".join(sys.argv))  # no passwords of URLs
    started = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"pid": os.getpid(), "command": command, "started": started}


def _busy(runs: Path, file: IO[str], wait_s: float) -> BusyError:
    file.seek(0)
    try:
        holder = json.loads(file.read())
        who = f"pid {holder['pid']}, since {holder['started']}: {holder['command']}"
    except ValueError:  # it has just taken the lock, or is just letting go
        who = "a process that has not yet written its name"
    waited = f" (waited {wait_s:g} s)" if wait_s else ""
    return BusyError(
        f"{runs} is in use by another run{waited}: {who}",
        hint="wait for it with paths.wait_s=600, or run beside it with paths.runs=<other folder>",
    )
