"""Forks that compute on a GPU: of processes that import once and fork for each job.

CUDA that was initialised before a fork is of no use after it ("Cannot re-initialize CUDA in forked
subprocess"). torch 2.13 initialises it when asked whether a GPU is there, unless NVML may answer
(`torch/cuda/__init__.py`, `is_available`); bitsandbytes 0.50 whenever it is imported, since it asks
for the GPU's capability (`cuda_specs.py`), and peft 0.21 imports bitsandbytes (`helpers.py`). vLLM
0.32 imports without it. Should a library do so all the same, a job gets a fresh process.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn


def keep_cuda_unused() -> None:
    """Let NVML say whether a GPU is there. To be called before anything asks."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"


def cuda_is_lost() -> bool:
    """Return True if this is a fork of a process that had initialised CUDA."""
    import torch

    return bool(torch.cuda._is_in_bad_fork())


def start_again(module: str, *args: str) -> NoReturn:
    """Become a fresh process that runs a module of ours: same number, environment and files."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, *args])
