"""Hardware of this machine, read from the system without torch, whose import takes seconds.

GPUs are those that NVML lists, through `nvidia-ml-py`, which vLLM brings. Device files prove
nothing: WSL has none, a container may have /dev/nvidia3 alone. Tests replace `listed`; all other
functions use it.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Gpu:
    """A GPU: its UUID, as in CUDA_VISIBLE_DEVICES, and its memory in bytes."""

    uuid: str
    memory: int


@dataclass(frozen=True)
class Gpus:
    """GPUs in the driver's order, and the driver: "580.65.06"; its newest CUDA version: (13, 0)."""

    devices: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] | None = None


@cache
def listed() -> Gpus:
    """Return every GPU that the driver lists; CUDA_VISIBLE_DEVICES changes nothing here."""
    try:
        import pynvml as nvml
    except ImportError:
        return Gpus()
    try:
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        devices = []
        for handle in handles:
            memory = psutil.virtual_memory().total  # of a GPU that shares the host's
            with suppress(nvml.NVMLError):
                memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
            devices.append(Gpu(nvml.nvmlDeviceGetUUID(handle), memory))
        driver = nvml.nvmlSystemGetDriverVersion()
        return Gpus(tuple(devices), driver, (number // 1000, number % 1000 // 10))
    except nvml.NVMLError:  # no driver, or none that runs
        return Gpus()


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA makes visible to this process."""
    return visible(listed().devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(devices: Sequence[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES selects, in its order; all if it is None.

    Entries are numbers or prefixes of UUIDs. As in CUDA, the first entry that names no device ends
    the list, and a device that is named twice empties it. A process sees one MIG instance, whose
    memory is taken to be that of the GPU.
    """
    if wanted is None:
        return tuple(devices)
    selected: list[Gpu] = []
    for name in map(str.strip, wanted.split(",")):
        if name.startswith("MIG-") and devices:
            return (Gpu(name, devices[0].memory),)
        chosen = [gpu for gpu in devices if name.startswith("GPU-") and gpu.uuid.startswith(name)]
        if name.isdigit():
            chosen = list(devices[int(name) : int(name) + 1])
        if len(chosen) != 1:
            break
        if chosen[0] in selected:
            return ()
        selected += chosen
    return tuple(selected)


def has_gpu(device: str = "auto") -> bool:
    """Return True if torch can use a GPU: a CUDA build, a visible one, `device` not "cpu"."""
    return device != "cpu" and bool(gpus()) and torch_build()[1] is not None


def gpu_count() -> int:
    """Return the number of GPUs that CUDA makes visible to this process."""
    return len(gpus())


def gpu_memory(device: str = "auto") -> int | None:
    """Return the memory of the smallest visible GPU in bytes; None if torch can use none."""
    return min(gpu.memory for gpu in gpus()) if has_gpu(device) else None


def resident_peak() -> int:
    """Return the most memory that was resident in this process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def installed(name: str) -> str:
    """Return the version of a distribution; empty if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


OLDEST_DRIVER = {12: 525, 13: 580}
"""Oldest driver branch for each major version of CUDA on Linux, from CUDA's release notes."""


def torch_build() -> tuple[str, tuple[int, int] | None]:
    """Return torch's version, and the CUDA version it was built for; None for a CPU build.

    Both come from the installed `torch/version.py`. The version is "0" if torch is not installed.
    """
    if not (release := installed("torch")):
        return "0", None
    spec = find_spec("torch")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    text = (folder / "version.py").read_text() if folder is not None else ""
    match = re.search(r"^cuda[^=]*= '(\d+)\.(\d+)'", text, re.M)
    return release, (int(match[1]), int(match[2])) if match else None


def driver_too_old() -> tuple[str, str, str] | None:
    """Return what a too old driver is, what torch needs, and what to do; None if it is new enough.

    CUDA runs on any driver of its major version (minor version compatibility).
    """
    (torch, built), cuda = torch_build(), listed().cuda
    if not gpus() or cuda is None or built is None or cuda[0] >= built[0]:
        return None
    needed = f"torch {torch} is built for CUDA {built[0]}.{built[1]}"
    if built[0] in OLDEST_DRIVER:
        needed += f", which needs driver {OLDEST_DRIVER[built[0]]} or newer"
    detected = f"driver {listed().driver} (CUDA {cuda[0]}.{cuda[1]})"
    return detected, needed, "a newer driver, or train.device=cpu"


def measured_on(device: Any, attention: str) -> dict[str, str]:
    """Return the hardware and library versions that decide how a model's sums are rounded.

    Two measurements with equal values give bit-identical numbers.
    """
    name = _cpu_fact("model name") or platform.machine()
    if device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
    facts = {"device": device.type, "name": name, "attention": attention}
    packages = ("torch", "transformers", "peft", "bitsandbytes")
    return facts | {name: release for name in packages if (release := installed(name))}


def _cpu_fact(*keys: str) -> str:
    """Return a line of /proc/cpuinfo by its key; empty if the system does not have it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in keys:
                return value.strip()
    return ""


EMULATED = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of oneDNN's `ONEDNN_MAX_CPU_ISA` under which it emulates bf16 products."""


def slow_bf16(device: str = "auto") -> bool:
    """Return True if models are computed on a CPU on which oneDNN emulates bf16 products."""
    if has_gpu(device):
        return False
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in EMULATED:
        return True
    return not _cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"}  # the last is Arm's


@cache
def _cpu_flags() -> frozenset[str]:
    return frozenset(_cpu_fact("flags", "Features").split())


def computing_dtype(stored: str, size: int, *, copies: int = 1, device: str = "auto") -> str:
    """Return the dtype in which this machine computes a model: float32 where bf16 is slow.

    It depends on the memory that the machine has, not on what is free, so that a repeated run
    computes the same. `size` is bytes of the weights in 16 bits, 0 if unknown; `copies` models may
    take half of the memory together.
    """
    if stored != "bfloat16" or not slow_bf16(device):
        return stored
    return "float32" if 2 * size * copies <= total_memory() / 2 else stored


def total_memory() -> int:
    """Return the bytes of memory of this machine or container."""
    total = int(psutil.virtual_memory().total)
    limit = _limit(CGROUP)
    return total if limit is None else min(total, limit)


def available_memory() -> int:
    """Return the bytes of memory that are available without swapping.

    The limit of a container counts, too: the system reports the memory of the whole machine there.
    """
    free = int(psutil.virtual_memory().available)
    left = left_in_container(CGROUP)
    return free if left is None else min(free, left)


def left_in_container(root: Path) -> int | None:
    """Return the bytes of memory that a control group may still use; None if it has no limit."""
    if (limit := _limit(root)) is None:
        return None
    used = int((root / "memory.current").read_text())
    pages = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    return max(0, limit - used + int(pages.get("inactive_file", 0)))  # pages that can be dropped


def _limit(root: Path) -> int | None:
    """Return the limit of a control group (version 2) in bytes; None if it has none."""
    file = root / "memory.max"
    text = file.read_text().strip() if file.is_file() else "max"
    return None if text == "max" else int(text)
