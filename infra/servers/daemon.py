"""Start background processes that outlive their command, and find and stop them later.

A daemon has a file `<home>/<name>.json` with its process id and start time. The pair identifies the
process even if another one gets the same id later, so `stop` never ends a foreign process.
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

from flows.servers.services import LOOPBACK, Record, record_of, record_path
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
    if daemon.port is not None and not port_is_free(daemon.port):
        raise BusyError(
            f"port {daemon.port} for {daemon.name} is taken",
            hint="stop the process that listens there, or take another port: "
            f"make up {daemon.name.upper()}_PORT={daemon.port + 1}",
        )
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    with log_path(daemon.name, home).open("ab") as log:
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
    record_path(daemon.name, home).write_text(json.dumps(asdict(record)) + "\n")
    return record


def wait_ready(daemon: Daemon, home: Path) -> None:
    """Wait until a started daemon is ready. Raises PlumblineError if it ends or is late."""
    deadline = time.monotonic() + daemon.start_s
    while not daemon.ready():
        if record_of(daemon.name, home) is None or time.monotonic() > deadline:
            stop(daemon.name, home)
            log = log_path(daemon.name, home)
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
    record_path(name, home).unlink(missing_ok=True)
    return process is not None


def port_is_free(port: int) -> bool:
    """Return True if no process listens on this loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def log_path(name: str, home: Path) -> Path:
    """Return the log file of a daemon; all runs append to it."""
    return home / f"{name}.log"
