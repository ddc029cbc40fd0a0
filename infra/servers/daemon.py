"""Start background processes that outlive their command, and find and stop them later.

A daemon has a file `<home>/<name>.json` with its process id and start time, so `stop` never ends a
foreign process that has got the same id later.
"""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from flows.servers.services import LOOPBACK, Record, record_of
from tasks.core.errors import BusyError, PlumblineError

TAIL_LINES = 15


@dataclass(frozen=True)
class Daemon:
    """A background process to start; `name` is that of its record and log, `env` is whole."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    ready: Callable[[], bool]
    port: int | None = None
    start_s: float = 120.0


def start(daemon: Daemon, home: Path, cwd: Path) -> Record:
    """Start a daemon if it does not run, without waiting until it is ready. Raises BusyError."""
    if (record := record_of(daemon.name, home)) is not None:
        return record
    if daemon.port is not None:
        try:
            socket.create_server((LOOPBACK, daemon.port)).close()
        except OSError as error:
            hint = f"make up {daemon.name.upper()}_PORT={daemon.port + 1}"
            raise BusyError(f"port {daemon.port} for {daemon.name}: {error}", hint=hint) from error
    with (home / f"{daemon.name}.log").open("ab") as log:
        child = subprocess.Popen(
            list(daemon.argv),
            cwd=cwd,
            env=dict(daemon.env),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    record = Record(child.pid, psutil.Process(child.pid).create_time(), daemon.port)
    (home / f"{daemon.name}.json").write_text(json.dumps(asdict(record)) + "\n")
    return record


def wait_ready(daemon: Daemon, home: Path) -> None:
    """Wait until a started daemon is ready. Raises PlumblineError if it ends or is late."""
    deadline = time.monotonic() + daemon.start_s
    while not daemon.ready():
        if record_of(daemon.name, home) is None or time.monotonic() > deadline:
            stop(daemon.name, home)
            log = home / f"{daemon.name}.log"
            raise PlumblineError(
                f"{daemon.name} did not start, see {log}",
                details=log.read_text(errors="replace").splitlines()[-TAIL_LINES:],
            )
        time.sleep(0.2)


def stop(name: str, home: Path, *, grace_s: float = 15.0) -> bool:
    """Stop a daemon and all of its descendants. Returns False if it does not run.

    The daemon gets SIGTERM first, its descendants after `grace_s` seconds. Processes that are left
    after the same time again get SIGKILL.
    """
    record = record_of(name, home)
    process = record.process() if record else None
    if process is not None:
        family = [process, *process.children(recursive=True)]
        for signalled, send in (([process], "terminate"), (family, "terminate"), (family, "kill")):
            for member in signalled:
                if member.is_running():  # also False for another process with its id
                    getattr(member, send)()
            if not psutil.wait_procs(family, timeout=grace_s)[1]:
                break
    (home / f"{name}.json").unlink(missing_ok=True)
    return process is not None
