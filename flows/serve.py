"""Check every byte of a registered model or a served folder, then serve it with vLLM.

    python flows/serve.py models:/plumbline@champion --port 8000    a registered version
    python flows/serve.py DIR --max-model-len 4096                  a served folder

What begins with `-`, and everything after it, is passed to `vllm serve`, which takes the place of
this process. Exit status: that of vLLM; 1 the folder is not what was registered, 2 no such version
or folder, or vLLM is not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # flows/ would shadow libraries
    from flows.cli.start import start

    start("flows.cli.tool", "serve")

import os
import shlex
from typing import NoReturn

from flows.cli.bootstrap import bootstrap, offer
from flows.cli.composed import Composed
from flows.cli.registry import named
from tasks.core import machine
from tasks.core.terminal import plain
from tasks.evaluation.model_folder import computing_dtype_of, dtype_of
from tasks.pipeline.artifact import require_published
from tasks.serving import llama_cpp
from tasks.serving.llama_cpp import gguf_file
from tasks.serving.vllm.server import serve_command

_KV_CACHE_GIB = 4
"""Most memory of vLLM's KV cache on a CPU, where it would otherwise ask for 92 % of the machine."""


def _memory() -> dict[str, str]:
    """Return the variable with the size of vLLM's KV cache on a CPU."""
    quarter = machine.available_memory() // 2**32
    return {"VLLM_CPU_KVCACHE_SPACE": str(min(max(quarter, 1), _KV_CACHE_GIB))}


def job(composed: Composed, words: list[str]) -> NoReturn:
    """Check a model, and let its server take the place of this process."""
    bootstrap(composed.runs)
    folder, version = named(composed)
    file = gguf_file(folder)
    command = serve_command(folder) if file is None else llama_cpp.serve_command(file)
    artifact = require_published(folder, version.digest if version else None)
    if file is None and computing_dtype_of(folder) != dtype_of(folder):
        command = [*command, "--dtype", "float32"]  # bf16 is slow here; a word below wins
    command = [*command, *words]
    needed = {} if machine.has_gpu() or file is not None else _memory()
    offer(needed)
    variables = "".join(f"{name}={os.environ[name]} " for name in needed)
    print(
        plain(f"digest verified: {artifact.digest}\n{variables}{shlex.join(command)}"), flush=True
    )
    os.execvp(command[0], command)
