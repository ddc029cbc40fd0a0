"""A stand-in for a GPU with torch's CPU build: NVML, and a driver that does not survive a fork.

Only the lowest layer is replaced, so the libraries' own code decides when CUDA is initialised.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

STARTS, LOST = "PLUMBLINE_TEST_STARTS", "PLUMBLINE_TEST_LOST"
"""Variables: a file that gets a line per started process; initialise CUDA in every process except
those that have to work without a fork."""
_process = {"initialised": False, "lost": False}


def initialised() -> bool:
    """Return True if anything in this process has initialised CUDA."""
    return _process["initialised"]


def install() -> None:
    """Give torch a GPU in this process."""
    import torch

    cuda: Any = torch.cuda
    cuda._is_compiled = lambda: True
    cuda._device_count_nvml = lambda: 1
    cuda._lazy_init = _initialise
    cuda._is_in_bad_fork = lambda: _process["lost"]
    cuda._get_device_properties = lambda _: SimpleNamespace(major=8, minor=0)
    low: Any = torch._C
    low._cuda_getDeviceCount = _count
    low._cuda_getCurrentRawStream = lambda _: 0
    accelerator: Any = torch.accelerator
    accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    os.register_at_fork(after_in_child=_fork)


def start() -> None:
    """Install the stand-in when a process starts: from `sitecustomize`."""
    install()
    with open(os.environ[STARTS], "a") as file:
        file.write(" ".join(sys.orig_argv) + "\n")
    if os.environ.get(LOST) and not {"--alone", "--answer-to"} & set(sys.orig_argv):
        _initialise()


def _initialise() -> None:
    if _process["lost"]:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
    _process["initialised"] = True


def _count() -> int:
    _initialise()
    return 1


def _fork() -> None:
    _process["lost"] = _process["initialised"]
