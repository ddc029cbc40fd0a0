"""vLLM inside a training rank, without side effects on the process.

vLLM assumes a process of its own: it seeds the random generators, pins threads, sets environment
variables, and destroys the default process group when an engine ends. Call it through this module.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from tasks.serving.vllm.job import FLASHINFER_SAMPLER


def engine_class() -> Any:
    """Return `vllm.LLM`; make engines inside `undisturbed`."""
    # vLLM reads some of these at import and some later.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = FLASHINFER_SAMPLER
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # between its own libraries
        from vllm import LLM
        from vllm.v1.engine import core

    # vLLM's own function destroys the default process group when an engine ends.
    core.cleanup_dist_env_and_memory = gc.collect
    return LLM


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the process state that vLLM changes.

    These are the random generators, the environment (`LD_PRELOAD` for its children,
    `LOCAL_WORLD_SIZE`), and on a CPU `torch.set_num_threads`, which vLLM disables.
    """
    import torch

    environment, threads = dict(os.environ), torch.set_num_threads
    count, dtype = torch.get_num_threads(), torch.get_default_dtype()
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    devices = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_num_threads = threads
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])
        if devices is not None:
            # After a failure this raises as well, and would hide the reason.
            with contextlib.suppress(*([RuntimeError] if sys.exception() else [])):
                torch.cuda.set_rng_state(devices)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
