"""Run a module in ranks that are forked after the imports that all of them need.

    python -m tests.ranks COUNT MODULE ARGUMENT ...

torchrun starts every rank from nothing, and its imports take longer than the training of a test.
Unlike there, all ranks have one order of sets, which the few tests that start torchrun vary.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module

import numpy as np

from tasks.process.torch_process import end_process, start_lean
from tasks.serving.vllm.child import import_vllm

SAMPLES = "RANKS_SAMPLE"
"""Variable that is set if ranks import vLLM, too."""


def rank(number: int, module: str, arguments: list[str]) -> None:
    """Become a rank; does not return."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    random.seed(number)  # processes that start alone differ, and so must these
    np.random.seed(number)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    end_process()


def main(count: int, module: str, arguments: list[str]) -> int:
    """Return the exit status of the first rank that fails; the others are ended then."""
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    start_lean()
    for name in ("deepspeed", "peft", "transformers.models.qwen2.modeling_qwen2"):
        import_module(name)
    if os.environ.pop(SAMPLES, ""):
        import_vllm()
    with socket.socket() as probe:  # last, so that nobody else takes the port meanwhile
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = set()
    for number in range(count):
        if (pid := os.fork()) == 0:
            rank(number, module, arguments)
        ranks.add(pid)
    failed = 0
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status and not failed:
            failed = os.waitstatus_to_exitcode(status)
            for other in ranks:
                with suppress(ProcessLookupError):
                    os.kill(other, signal.SIGTERM)
    return abs(failed)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
