"""Forks that can use a GPU, for processes that import once and fork for each job.

A process that has initialised CUDA cannot use it after a fork ("Cannot re-initialize CUDA in forked
subprocess"). torch 2.13 initialises CUDA to check for a GPU, unless NVML may answer
(`torch/cuda/__init__.py`, `is_available`). bitsandbytes 0.50 initialises it when imported
(`cuda_specs.py` reads the GPU's capability), and peft 0.21 imports bitsandbytes (`helpers.py`).
vLLM 0.32 does not. If a library initialises it anyway, the job gets a fresh process.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def keep_cuda_unused() -> None:
    """Let NVML check for a GPU. Call this before anything else does."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def cuda_is_lost() -> bool:
    """Return True if this is a fork of a process that had initialised CUDA."""
    import torch

    return bool(torch.cuda._is_in_bad_fork())


def start_again(module: str, *args: str) -> NoReturn:
    """Replace this process by a fresh one that runs a module: same pid, environment and files."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, *args])
