"""Run a module in ranks that are forked after the imports that all of them need.

    python -m tests.ranks COUNT MODULE ARGUMENT ...

torchrun starts every rank from nothing, and its imports take longer than the training of a test.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module

from tasks.process.block_unused_imports import start_lean
from tasks.process.exit_process import end_process


def rank(number: int, module: str, arguments: list[str]) -> None:
    """Become a rank; does not return."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number)}
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    end_process()


def main(count: int, module: str, arguments: list[str]) -> int:
    """Return the exit status of the first rank that fails; the others are ended then."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= place | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    start_lean()
    for name in ("deepspeed", "peft", "transformers.models.qwen2.modeling_qwen2"):
        import_module(name)
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
