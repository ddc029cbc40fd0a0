"""Keeps what a child process never uses from being imported by the libraries it does use.

transformers imports scikit-learn and SciPy for assisted generation and detection losses, DeepSpeed
imports MLflow for its autotuner, bitsandbytes calls `torch.compile` (and so imports the whole of
inductor) for kernels of devices we are not on; together that is half of a rank's time to its first
step. All of them ask first and do without: `None` in `sys.modules` is how Python says "not there".
"""

from __future__ import annotations

import logging
import os
import sys

UNUSED = ("sklearn", "scipy", "mlflow", "tensorboard", "wandb", "pandas", "matplotlib")


def start_lean(*more: str, compiler: bool = False) -> None:
    """Make `UNUSED` and `more` look uninstalled in this process.

    `torch.compile` becomes an identity, unless `compiler` or `TORCHDYNAMO_DISABLE=0` keeps it. Has
    to run before the big imports.
    """
    if not compiler:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    for name in (*UNUSED, *more):
        if name not in sys.modules:
            sys.modules[name] = None  # type: ignore[assignment]
    # On CPUs with AVX-512 BF16 bitsandbytes regrets a kernel that no layer here uses.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def on_gpu() -> bool:
    """Return True if torch computes on an accelerator in this process."""
    import torch

    return bool(torch.accelerator.is_available())


def compiles() -> bool:
    """Return True if vLLM compiles models in this process and captures CUDA graphs.

    It does on a GPU. On a CPU compiling costs more than it gives. Without dynamo it cannot: vLLM
    0.32 ends in "aot_compile is not supported by the current configuration".
    """
    return on_gpu() and os.environ.get("TORCHDYNAMO_DISABLE", "0") != "1"
