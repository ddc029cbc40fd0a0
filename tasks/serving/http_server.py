"""Run a model server as a child process on loopback, for as long as a block needs it.

    with running(argv, port, timeout_s, stage="smoke_eval", log=log, log_path=path) as url:
        url                             http://127.0.0.1:<port>

The server belongs to the supervised children of the flow (`tasks/process/child.py`), so that it
ends with the flow, whatever happens to the flow. `vllm/server.py` and `llama_cpp.py` make commands.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from tasks.core.errors import PlumblineError, StageProcessError
from tasks.process.child import Child
from tasks.process.output import Log, Output

HOST = "127.0.0.1"
NAME = "model"
"""Name under which a folder is served."""
_POLL_S = 0.25
_LAST_WORDS_S = 10.0
"""Seconds in which a server that stopped answering may end and say why."""


class EndedError(Exception):
    """The server ended before it was healthy."""


class Server:
    """A server as a child process; the command listens on `HOST` and `port`, and has `/health`."""

    def __init__(
        self,
        argv: Sequence[str],
        port: int,
        *,
        stage: str,
        log: Log,
        log_path: Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.url, self._stack = f"http://{HOST}:{port}", ExitStack()
        output = Output(stage=stage, log=log, log_path=log_path)
        self._output = self._stack.enter_context(output)
        self.child = self._stack.enter_context(started(argv, env))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_healthy(self, until: float = math.inf) -> None:
        """Wait until the server is healthy; `until` is a time of `time.monotonic()`.

        Raises EndedError if the server has ended or the time is over.
        """
        while self.child.poll() is None and time.monotonic() < until:
            with suppress(httpx.HTTPError):
                health = httpx.get(f"{self.url}/health", timeout=5, verify=False, trust_env=False)
                if health.is_success:
                    return
            time.sleep(_POLL_S)
        raise EndedError

    def last_lines(self) -> list[str]:
        """Return the last lines of output; of a server that has ended, its last words."""
        self._reader.join(_LAST_WORDS_S if self.child.poll() is not None else 0.0)
        return list(self._output.tail)

    def end(self) -> None:
        """End the server and all of its processes."""
        self.child.end()
        self._reader.join(_LAST_WORDS_S)
        self._stack.close()

    def _read(self) -> None:
        with suppress(ValueError):  # `end` closes it, while this thread waits for the next line
            while chunk := self.child.read(math.inf):
                for _ in self._output.feed(chunk):
                    pass  # a server has no events


@contextmanager
def running(argv: Sequence[str], port: int, timeout_s: float, **how: Any) -> Iterator[str]:
    """Start a server, wait until it is healthy, and yield its address; `how` is for `Server`.

    `timeout_s` limits the start and the whole block. Raises StageProcessError with the last lines
    of output if the server ended or the time is over.
    """
    server = Server(argv, port, **how)
    late = threading.Timer(timeout_s, server.child.cancel)
    late.daemon = True
    late.start()
    try:
        server.wait_until_healthy()
        yield server.url
    except (PlumblineError, EndedError) as error:
        if not isinstance(error, EndedError) and not server.child.wait(_LAST_WORDS_S):
            raise
        reason = "timeout" if server.child.cancelled else "exit"
        tail = server.last_lines()
        raise StageProcessError(how["stage"], server.child.poll(), tail, reason) from error
    finally:
        late.cancel()
        server.end()


@contextmanager
def started(argv: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[Child]:
    """Start a supervised child, and end it with the block.

    It has a temporary folder of its own: vLLM's processes talk over sockets in TMPDIR, which would
    stay there when they are killed. The name is short: a socket's path has 107 characters at most.
    """
    with (
        TemporaryDirectory(prefix="pl-", ignore_cleanup_errors=True) as folder,
        Child(argv, env={**(env or {}), "TMPDIR": folder}) as child,
    ):
        yield child


def free_port() -> int:
    """Return a port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
