"""A child process and everything it starts, with one handle that ends all of it.

`Child` runs a command under `tasks/process/supervise.py`. The handle is the write end of a pipe:
closing it ends the command with all descendants, and so does our own death, because the kernel
closes it then. `launch` and `Conversation` are what stages use; `kill_children_on_abort` ends
whatever they have running when a flow is interrupted.
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

PROJECT = Path(__file__).resolve().parents[2]
SUPERVISOR = Path(__file__).with_name("supervise.py")

GRACE_S = 5.0
"""From SIGTERM to SIGKILL. With the supervisor's wait after SIGKILL it stays under ten seconds."""

GONE_WITHIN_S = 9.0
"""When the supervisor itself has not ended by then, something is wrong with it: kill it too."""

POLL_S = 0.5
CHUNK = 1 << 16

MARK = "PLUMBLINE_CHILD"
"""Environment variable by which descendants are found should their supervisor be killed."""


class Child:
    """A command under supervision. Its standard output and error are one stream.

    Args:
        argv: the command.
        env: additions to our own environment.
        output: a file to write to; without it `stdout` is a pipe to read from.
        stdin: whether to open a pipe to its standard input.
        grace_s: seconds from SIGTERM to SIGKILL when it is ended.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
        stdin: bool = False,
        grace_s: float = GRACE_S,
    ) -> None:
        self._mark = uuid.uuid4().hex
        self._lock = threading.Lock()
        self.cancelled = False
        read_end, self._handle = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), str(read_end), str(grace_s), *argv],
                pass_fds=(read_end,),
                env=child_environment(env or {}) | {MARK: self._mark},
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=output or subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at the terminal is for us alone
            )
        except BaseException:
            os.close(self._handle)
            raise
        finally:
            os.close(read_end)

    @property
    def pid(self) -> int:
        """Process id of the supervisor, which is also its session and process group."""
        return self._process.pid

    @property
    def stdin(self) -> IO[bytes]:
        """The command's standard input."""
        assert self._process.stdin is not None, "started without stdin"
        return self._process.stdin

    @property
    def stdout(self) -> IO[bytes]:
        """The command's output."""
        assert self._process.stdout is not None, "its output goes to a file"
        return self._process.stdout

    def poll(self) -> int | None:
        """Exit status once the command and all descendants are gone, else None."""
        return self._process.poll()

    def read(self, deadline: float) -> bytes | None:
        """The next bytes of output; empty at its end, None when `deadline` has passed.

        `deadline` is a time of `time.monotonic()`; infinity is allowed.
        """
        poll = select.poll()
        poll.register(self.stdout, select.POLLIN)
        gone = False
        while True:
            left = min(POLL_S, deadline - time.monotonic())
            if left <= 0:
                return None
            if poll.poll(left * 1000):
                return os.read(self.stdout.fileno(), CHUNK)
            if gone:  # yet a stranger holds its output open: do not wait for that one
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
        """Begin to end it, without waiting."""
        self.cancelled = True
        self._let_go()

    def kill(self, pids: Collection[int]) -> None:
        """SIGKILL those of its descendants whose process ids are given."""
        kill_marked(self._mark, pids)

    def end(self) -> int | None:
        """End it with all descendants, wait for that, and return the exit status."""
        self._let_go()
        if not self.wait(GONE_WITHIN_S):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait(1.0)
        status = self.poll()
        if status is None or status < 0:  # killed: perhaps the supervisor and not the command
            kill_marked(self._mark)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # a request that nobody will read
                    stream.close()
        return status

    def _let_go(self) -> None:
        with self._lock:
            if self._handle >= 0:
                os.close(self._handle)
                self._handle = -1


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Our environment with `extra`, the project importable from anywhere, output unbuffered.

    `MLFLOW_RUN_ID` is taken out: MLflow's fluent calls in a child that inherits it would finish
    the parent's run.
    """
    env = {**os.environ, **extra}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), env.get("PYTHONPATH")]))
    env["PYTHONUNBUFFERED"] = "1"
    env.pop("MLFLOW_RUN_ID", None)
    return env


def kill_marked(mark: str, pids: Collection[int] | None = None) -> None:
    """SIGKILL every process of ours, or of `pids`, that carries `mark` in its environment."""
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        # PermissionError: another user's. ProcessLookupError, FileNotFoundError: it just ended.
        with contextlib.suppress(PermissionError, ProcessLookupError, FileNotFoundError):
            if not entry.name.isdigit() or (pids is not None and int(entry.name) not in pids):
                continue
            if wanted in (entry / "environ").read_bytes().split(b"\0"):
                os.kill(int(entry.name), signal.SIGKILL)


def python_child(module: str, *args: str) -> list[str]:
    """The command that runs a module of ours with this very interpreter, unbuffered."""
    return [sys.executable, "-u", "-m", module, *args]


_LIVE: set[Child] = set()


@contextlib.contextmanager
def live(child: Child) -> Iterator[Child]:
    """Within it `kill_children_on_abort` knows the child; at its end the child is ended."""
    _LIVE.add(child)
    try:
        yield child
    finally:
        try:
            child.end()
        finally:
            _LIVE.discard(child)


@contextlib.contextmanager
def kill_children_on_abort() -> Iterator[None]:
    """End every child of `launch` and `Conversation` when the block is left by an exception.

    A stage that runs in the main thread ends its own child on the way out. This is for those that
    run in other threads (`task.submit()`), which no signal reaches: they see their child end and
    raise `StageProcessError` with reason "cancelled".
    """
    try:
        yield
    except BaseException:
        children = list(_LIVE)
        for child in children:
            child.cancel()
        deadline = time.monotonic() + GONE_WITHIN_S
        for child in children:
            child.wait(max(0.0, deadline - time.monotonic()))
        raise
