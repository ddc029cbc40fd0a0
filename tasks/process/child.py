"""Run a child process with a handle that ends it and all of its descendants.

`Child` runs a command under `tasks/process/supervise.py`. The handle is the write end of a pipe.
Closing it ends the command with all descendants. The kernel closes it, too, when this process dies.
Stages use `launch` and `Conversation`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PROJECT = Path(__file__).resolve().parents[2]
SUPERVISOR = Path(__file__).with_name("supervise.py")

GONE_WITHIN_S = 9.0
"""Seconds until a supervisor is killed, too; more than its own GRACE_S and KILL_WAIT_S together."""

POLL_S = 0.5
CHUNK = 1 << 16

MARK = "PLUMBLINE_CHILD"
"""Environment variable that marks descendants, to find them if their supervisor is killed."""


class Child:
    """A supervised command, a context manager. Its standard output and error are one stream.

    They go to a file (`output`), or to a pipe that `read` reads. `env` are additions to the
    environment; `stdin` is True for a pipe to the command's standard input.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
        stdin: bool = False,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._lock = threading.Lock()
        self.cancelled = False
        read_end, self._handle = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), str(read_end), *argv],
                pass_fds=(read_end,),
                env=child_environment(env or {}) | {MARK: self._mark},
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=output or subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at the terminal reaches this process only
            )
        except BaseException:
            os.close(self._handle)
            raise
        finally:
            os.close(read_end)
        self.pid = self._process.pid
        """Process id of the supervisor; also the id of its session and process group."""
        self.stdin: Any = self._process.stdin
        self.stdout: Any = self._process.stdout

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def poll(self) -> int | None:
        """Return the exit status; None while the command or a descendant is alive."""
        return self._process.poll()

    def read(self, deadline: float) -> bytes | None:
        """Return the next bytes of output; empty at its end, None after the deadline."""
        poll = select.poll()
        poll.register(self.stdout, select.POLLIN)
        gone = False
        while True:
            left = min(POLL_S, deadline - time.monotonic())
            if left <= 0:
                return None
            if poll.poll(left * 1000):
                return os.read(self.stdout.fileno(), CHUNK)
            if gone:  # another process still has the pipe open: do not wait for it
                return b""
            gone = self.poll() is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait until the command and all descendants are gone; False if time ran out."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def cancel(self) -> None:
        """Start to end the command, without waiting."""
        self.cancelled = True
        self._let_go()

    def end(self) -> int | None:
        """End the command with all descendants and wait. Returns the exit status."""
        self._let_go()
        if not self.wait(GONE_WITHIN_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(1.0)
        status = self.poll()
        if status is None or status < 0:  # perhaps the supervisor was killed, not the command
            kill_marked(self._mark)
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # an unread request
                    stream.close()
        return status

    def _let_go(self) -> None:
        with self._lock:
            if self._handle >= 0:
                os.close(self._handle)
                self._handle = -1


_NOT_FOR_CHILDREN = (
    "MLFLOW_RUN_ID",  # fluent MLflow calls of a child would end the parent's run
    "PREFECT_API_AUTH_STRING",  # a user's reward function runs there
    "PREFECT_SERVER_API_AUTH_STRING",
    "RANK",  # Kubeflow sets these for torchrun: a child would take itself for a rank
    "WORLD_SIZE",
)


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: that of this one, and `extra`.

    The project is on the path. No module is imported from the working directory: it may be a
    downloaded checkpoint, and a `uvicorn/` or `json.py` in it would run.
    """
    inherited = {
        key: value
        for key, value in os.environ.items()
        if key not in _NOT_FOR_CHILDREN and not key.startswith("PET_")
    }
    env = inherited | dict(extra)
    path = [str(PROJECT), *env.get("PYTHONPATH", "").split(os.pathsep)]
    # An empty entry stands for the working directory.
    env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    env["PYTHONSAFEPATH"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    return env


def kill_marked(mark: str) -> None:
    """Send SIGKILL to every process with this value of `PLUMBLINE_CHILD` in its environment."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        # PermissionError: another user's process. The others: the process has just ended.
        with contextlib.suppress(PermissionError, ProcessLookupError, FileNotFoundError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def python_child(module: str, *args: str) -> list[str]:
    """Return the command that runs a module with this interpreter and unbuffered output."""
    return [sys.executable, "-u", "-m", module, *args]
