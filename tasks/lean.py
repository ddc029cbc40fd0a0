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
