"""Block imports of libraries that a child process never uses, which makes its start faster.

transformers imports scikit-learn and SciPy for assisted generation and detection losses. DeepSpeed
imports MLflow for its autotuner. bitsandbytes calls `torch.compile`, which imports inductor, for
kernels of other devices. Together this is half of a rank's time to its first step. All three work
without these libraries; `None` in `sys.modules` makes Python treat a module as not installed.
"""

from __future__ import annotations

import logging
import os
import sys

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
