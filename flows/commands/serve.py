"""Run `python flows/serve.py MODEL ...`: check every byte of a model, then become its server."""

from __future__ import annotations

import os
import shlex
import sys

from flows.cli.bootstrap import bootstrap, offer
from flows.cli.config import Composed
from flows.cli.entry import exit_on_signals, run_main
from flows.commands.prune import PROJECT
from flows.commands.registry import named, verified
from tasks.core import machine
from tasks.core.terminal import plain
from tasks.evaluation.evaluation_prompts import computing_dtype_of, dtype_of
from tasks.serving import llama_cpp
from tasks.serving.llama_cpp import gguf_file
from tasks.serving.vllm.server import serve_command

_KV_CACHE_GIB = 4
"""Most memory of vLLM's KV cache on a CPU, where it would otherwise ask for 92 % of the machine."""


def _memory() -> dict[str, str]:
    """Return the variable with the size of vLLM's KV cache on a CPU."""
    quarter = machine.available_memory() // 2**32
    return {"VLLM_CPU_KVCACHE_SPACE": str(min(max(quarter, 1), _KV_CACHE_GIB))}


def main() -> int:
    """Run the command of this process; the server takes its place. Returns the exit status."""
    words = sys.argv[1:]
    # `--help` alone is ours; after a model it belongs to vLLM.
    end = next((i for i, word in enumerate(words) if i and word.startswith("-")), len(words))
    command: list[str] = []

    def job(composed: Composed, overrides: list[str]) -> int:
        bootstrap(PROJECT, composed.runs)
        folder, version = named(composed)
        file = gguf_file(folder)
        program = serve_command(folder) if file is None else llama_cpp.serve_command(file)
        artifact = verified(composed, folder, version)
        if file is None and computing_dtype_of(folder) != dtype_of(folder):
            program = [*program, "--dtype", "float32"]  # bf16 is slow here; a word below wins
        command.extend([*program, *words[end:]])
        needed = {} if machine.has_gpu() or file is not None else _memory()
        offer(needed)
        variables = "".join(f"{name}={os.environ[name]} " for name in needed)
        shown = f"digest verified: {artifact.digest}\n{variables}{shlex.join(command)}"
        print(plain(shown), flush=True)
        return 0

    with exit_on_signals():
        status = run_main("serve", job, argv=words[:end])
    if command and not status:
        os.execvp(command[0], command)
    return status
