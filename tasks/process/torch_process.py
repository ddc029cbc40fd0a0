"""Start a child process with torch fast, without libraries that it never uses, and end it.

transformers imports scikit-learn and SciPy for assisted generation and detection losses. DeepSpeed
imports MLflow for its autotuner. bitsandbytes calls `torch.compile`, which imports inductor, for
kernels of other devices. Together this is half of a rank's time to its first step. All three work
without these libraries; `None` in `sys.modules` makes Python treat a module as not installed.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from typing import NoReturn

UNUSED = ("sklearn", "scipy", "mlflow", "tensorboard", "wandb", "pandas", "matplotlib")


def start_lean(*more: str, compiler: bool = False) -> None:
    """Make modules look uninstalled in this process. Call it before importing torch.

    `compiler` keeps `torch.compile`, which returns its function unchanged otherwise, unless
    `TORCHDYNAMO_DISABLE=0` is set.
    """
    if not compiler:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for name in (*UNUSED, *more):
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]
    # bitsandbytes warns about a kernel for CPUs with AVX-512 BF16 that no layer here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def on_gpu() -> bool:
    """Return True if torch can use an accelerator in this process."""
    import torch

    return bool(torch.accelerator.is_available())


def compiles() -> bool:
    """Return True if vLLM compiles models in this process and captures CUDA graphs.

    It does on a GPU. On a CPU compiling takes longer than it saves. Without dynamo it cannot: vLLM
    0.32 fails with "aot_compile is not supported by the current configuration".
    """
    return on_gpu() and os.environ.get("TORCHDYNAMO_DISABLE", "0") != "1"


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
