"""vLLM as a guest in a training rank's process: it comes late, changes nothing, and can leave.

It takes a process for its own: it seeds the random generators, pins threads, sets variables, and
destroys the default process group when an engine ends. Every call of it goes through here.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from tasks.serving.vllm.job import FLASHINFER_SAMPLER


def engine_class() -> Any:
    """`vllm.LLM`, to be made within `undisturbed`."""
    # vLLM reads these when it is imported, or whenever it pleases.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = FLASHINFER_SAMPLER
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of its libraries, about each other
        from vllm import LLM
        from vllm.v1.engine import core

    # What it does when an engine ends, or is collected: it destroys the default process group.
    core.cleanup_dist_env_and_memory = gc.collect
    return LLM


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Put back what vLLM changes in a process that it takes for its own.

    The state of every random generator, the environment (`LD_PRELOAD` for its children,
    `LOCAL_WORLD_SIZE`), and on a CPU `torch.set_num_threads`, which it makes do nothing.
    """
    import torch

    environment, threads = dict(os.environ), torch.set_num_threads
    count, dtype = torch.get_num_threads(), torch.get_default_dtype()
    drawn = torch.get_rng_state(), np.random.get_state(), random.getstate()
    devices = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
    try:
        yield
    finally:
        torch.set_num_threads = threads
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        torch.set_default_dtype(dtype)
        torch.set_rng_state(drawn[0])
        np.random.set_state(drawn[1])
        random.setstate(drawn[2])
        if devices is not None:
            torch.cuda.set_rng_state(devices)
        for name in set(os.environ) - set(environment):
            del os.environ[name]
        os.environ.update(environment)
