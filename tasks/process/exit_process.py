"""End a process that has imported torch, without crashing on the way out."""

from __future__ import annotations

import atexit
import os
import sys
from typing import NoReturn


def end_process(status: int = 0) -> NoReturn:
    """End this process with `status`, without the interpreter's finalization.

    Exit handlers run and output is flushed. Threads of gloo and others outlive the process group.
    If one of them releases a tensor during finalization, it needs a lock that no longer exists and
    aborts the process (pytorch/pytorch#179291), so that a finished training would count as failed.
    Skipping finalization also saves 1.3 s, with vLLM 2.2 s.
    """
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
