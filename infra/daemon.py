"""Background processes that outlive the command that started them, and are found again later.

A daemon leaves `<home>/<name>.json`: its process id and that process's start time. The pair cannot
be mistaken for another process that got the same id after a reboot or a wrap-around, so that
stopping "what we started" never hits anything else.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from tasks.core.errors import BusyError, PlumblineError

LOOPBACK = "127.0.0.1"
TAIL_LINES = 15


@dataclass(frozen=True)
class Daemon:
    """What to start and how to know that it works.

    Attributes:
        name: file name of its record and log.
        argv: the command.
        env: the whole environment of the process.
        ready: true once it does its work.
        port: the loopback port that it opens; None when it opens none.
        start_s: how long it may take to become ready.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    ready: Callable[[], bool]
    port: int | None = None
    start_s: float = 120.0


@dataclass(frozen=True)
class Record:
    """Which process a daemon is: process id, its start time in seconds since the epoch, port."""

    pid: int
    started: float
    port: int | None

    def process(self) -> psutil.Process | None:
        """The process, or None when it ended (or another one has its id by now)."""
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return None
            return process if process.create_time() == self.started else None
        except psutil.NoSuchProcess:
            return None


def record_of(name: str, home: Path) -> Record | None:
    """The record of a daemon that runs now, or None."""
    try:
        record = Record(**json.loads(_record_path(name, home).read_text()))
    except FileNotFoundError:
        return None
    return record if record.process() else None


def start(daemon: Daemon, home: Path, cwd: Path) -> Record:
    """Starts a daemon; one that runs already is left as it is. Does not wait until it is ready.

    Raises:
        BusyError: somebody else listens on its port, or it runs on another port.
    """
    if (record := record_of(daemon.name, home)) is not None:
        if record.port != daemon.port:
            raise BusyError(
                f"{daemon.name} runs already, on port {record.port} instead of {daemon.port}",
                hint="make down, then make up with the ports you want",
            )
        return record
    if daemon.port is not None:
        _require_free(daemon.name, daemon.port)
    home.mkdir(parents=True, exist_ok=True)
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
    _record_path(daemon.name, home).write_text(json.dumps(asdict(record)) + "\n")
    return record


def wait_ready(daemon: Daemon, home: Path) -> None:
    """Waits until a started daemon does its work.

    Raises:
        PlumblineError: it ended, or was not ready in time (then it is stopped); the tail of its
            log is attached.
    """
    deadline = time.monotonic() + daemon.start_s
    while not daemon.ready():
        ended = record_of(daemon.name, home) is None
        if ended or time.monotonic() > deadline:
            stop(daemon.name, home)
            log = log_path(daemon.name, home)
            what = (
                "ended before it was ready"
                if ended
                else f"was not ready within {daemon.start_s:.0f} s"
            )
            raise PlumblineError(
                f"{daemon.name} {what}",
                details=log.read_text(errors="replace").splitlines()[-TAIL_LINES:],
                hint=f"the whole log is {log}",
            )
        time.sleep(0.2)


def stop(name: str, home: Path, *, grace_s: float = 15.0) -> bool:
    """Ends a daemon and everything that it started; false when it does not run.

    It is asked first; after `grace_s` seconds its descendants are asked too, and after as many
    again whatever is left is killed.
    """
    record = record_of(name, home)
    process = record.process() if record else None
    if process is not None:
        family = [process, *process.children(recursive=True)]
        _ask(process)
        _, alive = psutil.wait_procs(family, timeout=grace_s)
        for member in alive:
            _ask(member)
        _, alive = psutil.wait_procs(alive, timeout=grace_s if alive else 0)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    _record_path(name, home).unlink(missing_ok=True)
    return process is not None


def port_is_free(port: int) -> bool:
    """Whether nobody listens on this loopback port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def _ask(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.terminate()


def _require_free(name: str, port: int) -> None:
    if not port_is_free(port):
        raise BusyError(
            f"port {port} for {name} is taken by a process that `make up` did not start",
            hint=f"stop that process, or take another port: make up {name.upper()}_PORT={port + 1}",
        )


def log_path(name: str, home: Path) -> Path:
    """Where a daemon's output goes, run after run."""
    return home / f"{name}.log"


def _record_path(name: str, home: Path) -> Path:
    return home / f"{name}.json"
