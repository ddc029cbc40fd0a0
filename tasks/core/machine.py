"""Hardware of this machine, read from the system without torch, whose import takes seconds.

GPUs are those that NVML lists, through `nvidia-ml-py`, or `nvidia-smi` if that is not installed.
Device files prove nothing: WSL has none, a container may have /dev/nvidia3 alone, MIG has others.
Tests replace `listed`; all other functions use it.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
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
_NAMES = (
    # files of limit, usage and statistics, and the statistic of droppable files: version 2, then 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
     "total_inactive_file"),
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """A GPU, or a MIG instance of one.

    Attributes:
        uuid: as in CUDA_VISIBLE_DEVICES: "GPU-..." or "MIG-...".
        memory: bytes.
        instances: MIG instances of a GPU in MIG mode.
    """

    uuid: str
    memory: int
    instances: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Gpus:
    """GPUs of this machine or container, and their driver.

    Attributes:
        devices: in the driver's order.
        driver: version, such as "580.65.06"; empty if unknown.
        cuda: newest CUDA version that the driver supports, such as (13, 0); None if unknown.
    """

    devices: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: tuple[int, int] | None = None


@cache
def listed() -> Gpus:
    """Return every GPU that the driver lists; CUDA_VISIBLE_DEVICES changes nothing here."""
    try:
        import pynvml  # nvidia-ml-py; the CUDA lock has it through flashinfer
    except ImportError:
        return _of_tool(shutil.which("nvidia-smi"))
    return _of_nvml(pynvml)


def _of_nvml(nvml: Any) -> Gpus:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:  # no driver, or none that runs
        return Gpus()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        number = nvml.nvmlSystemGetCudaDriverVersion_v2()
        driver = nvml.nvmlSystemGetDriverVersion()
        devices = tuple(_device(nvml, handle) for handle in handles)
        return Gpus(devices, driver, (number // 1000, number % 1000 // 10))
    except nvml.NVMLError:
        return Gpus()
    finally:
        nvml.nvmlShutdown()


def _device(nvml: Any, handle: Any) -> Gpu:
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    except nvml.NVMLError:  # the GPU shares the host's memory
        memory = psutil.virtual_memory().total
    return Gpu(nvml.nvmlDeviceGetUUID(handle), memory, tuple(_instances(nvml, handle)))


def _instances(nvml: Any, handle: Any) -> list[Gpu]:
    """Return the MIG instances of a GPU; empty if it is not in MIG mode."""
    instances: list[Gpu] = []
    try:
        places = nvml.nvmlDeviceGetMigMode(handle)[0] and nvml.nvmlDeviceGetMaxMigDeviceCount(
            handle
        )
    except nvml.NVMLError:  # a GPU without MIG
        return instances
    for index in range(places):
        with suppress(nvml.NVMLError):  # no instance at this index
            instances.append(_device(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
    return instances


def _of_tool(tool: str | None) -> Gpus:
    if tool is None:
        return Gpus()
    ask = [tool, "--query-gpu=uuid,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Gpus()
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.startswith("GPU-")]
    shared = psutil.virtual_memory().total  # for a GPU without memory of its own: "[N/A]"
    devices = (Gpu(u, int(size) * 2**20 if size.isdigit() else shared) for u, size, _ in rows)
    return Gpus(tuple(devices), rows[0][2] if rows else "")


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA makes visible to this process."""
    return visible(listed().devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(devices: Sequence[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES selects, in its order.

    The rules are CUDA's (torch 2.13, `torch/cuda/__init__.py`, `_parse_visible_devices`): entries
    are numbers or prefixes of UUIDs. The first entry that names no device ends the list. A device
    that is named twice empties it. A process sees at most one MIG instance.

    Args:
        wanted: value of the variable; None if it is not set.
    """
    if wanted is None:
        names = [str(number) for number in range(len(devices))]
    else:
        names = [name.strip() for name in wanted.split(",")]
    selected: list[Gpu] = []
    for name in names:
        device = _named(devices, name)
        if device is None:
            break
        if device in selected:
            return ()
        selected.append(device)
        if device.uuid.startswith("MIG-"):
            return (device,) if len(selected) == 1 else tuple(selected[:-1])
    return tuple(selected)


def _named(devices: Sequence[Gpu], name: str) -> Gpu | None:
    """Return the device with a number or UUID; for a GPU in MIG mode its first instance."""
    if name.startswith(("GPU-", "MIG-")):
        every = [*devices, *(instance for device in devices for instance in device.instances)]
        chosen = [device for device in every if device.uuid.startswith(name)]
    else:
        digits = re.match(r"\d+", name)  # like strtoul: "1gpu" is 1; "-1" and words name nothing
        chosen = list(devices[int(digits[0]) :][:1]) if digits else []
    if len(chosen) != 1:
        return None
    return chosen[0].instances[0] if chosen[0].instances else chosen[0]


def has_gpu(device: str = "auto") -> bool:
    """Return True if torch can use a GPU: one is visible, and torch is a CUDA build.

    Args:
        device: `train.device` for a question about the ranks: "cpu" gives False.
    """
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


OLDEST_DRIVER = {12: 525, 13: 580}
"""Oldest driver branch for each major version of CUDA on Linux, from CUDA's release notes."""


def torch_build() -> tuple[str, tuple[int, int] | None]:
    """Return torch's version, and the CUDA version it was built for; None for a CPU build.

    Both come from the installed `torch/version.py`. The version is "0" if torch is not installed.
    """
    try:
        release = version("torch")
    except PackageNotFoundError:
        return "0", None
    spec = find_spec("torch")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    text = (folder / "version.py").read_text() if folder is not None else ""
    match = re.search(r"^cuda[^=]*= '(\d+)\.(\d+)'", text, re.M)
    return release, (int(match[1]), int(match[2])) if match else None


def driver_too_old() -> tuple[str, str, str] | None:
    """Return texts about a driver that is too old for torch; None if it is new enough.

    CUDA runs on any driver of its major version (minor version compatibility).

    Returns:
        Texts of the detected driver, of the one that torch needs, and of what to do.
    """
    count, (torch, built) = gpu_count(), torch_build()
    driver, cuda = listed().driver, listed().cuda
    if count and cuda is not None and built is not None and cuda[0] < built[0]:
        shown = f"{count} GPU{'s' * (count > 1)}"
        detected = f"{shown} with driver {driver} (CUDA {cuda[0]}.{cuda[1]})"
        oldest = OLDEST_DRIVER.get(built[0])
        needed = f"torch {torch} is built for CUDA {built[0]}.{built[1]}" + (
            f", which needs driver {oldest} or newer" if oldest else ""
        )
        return detected, needed, "a newer driver, or train.device=cpu"
    return None


def measured_on(device: Any, attention: str) -> dict[str, str]:
    """Return the hardware and library versions that decide how a model's sums are rounded.

    Two measurements with equal values give bit-identical numbers.
    """
    name = _cpu()
    if device.type == "cuda":
        import torch

        name = torch.cuda.get_device_name(device)
    facts = {"device": device.type, "name": name, "attention": attention}
    for package in ("torch", "transformers", "peft", "bitsandbytes"):
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue
    return facts


def _cpu() -> str:
    """Return the name of the CPU, or its architecture if the system does not name it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()


EMULATED = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of oneDNN's `ONEDNN_MAX_CPU_ISA` under which it emulates bf16 products."""


def slow_bf16(device: str = "auto") -> bool:
    """Return True if models are computed on a CPU on which oneDNN emulates bf16 products.

    Args:
        device: `train.device` for a question about the ranks: "cpu" leaves GPUs alone.
    """
    if has_gpu(device):
        return False
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in EMULATED:
        return True
    return not _cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"}  # the last is Arm's


@cache
def _cpu_flags() -> frozenset[str]:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("flags", "Features"):
                return frozenset(value.split())
    return frozenset()


def computing_dtype(stored: str, size: int, *, copies: int = 1, device: str = "auto") -> str:
    """Return the dtype in which this machine computes a model: float32 where bf16 is slow.

    It depends on the memory that the machine has, not on what is free, so that a repeated run
    computes the same.

    Args:
        stored: torch name of the dtype of the weights.
        size: bytes of the weights in 16 bits; 0 if unknown.
        copies: models in memory at once, which may take half of it together.
        device: as of `slow_bf16`.
    """
    if stored != "bfloat16" or not slow_bf16(device):
        return stored
    return "float32" if 2 * size * copies <= total_memory() / 2 else stored


def total_memory() -> int:
    """Return the bytes of memory of this machine or container."""
    total = int(psutil.virtual_memory().total)
    for limit, *_ in _NAMES:
        if (CGROUP / limit).is_file():
            most = (CGROUP / limit).read_text().strip()
            return total if most == "max" else min(total, int(most))
    return total


def available_memory() -> int:
    """Return the bytes of memory that are available without swapping.

    The limit of a container counts, too: the system reports the memory of the whole machine there.
    """
    free = int(psutil.virtual_memory().available)
    left = left_in_container(CGROUP)
    return free if left is None else min(free, left)


def left_in_container(root: Path) -> int | None:
    """Return the bytes of memory that a control group may still use; None if it has no limit."""
    for limit, usage, stat, droppable in _NAMES:
        if not (root / limit).is_file():
            continue
        most = (root / limit).read_text().strip()
        if most == "max":
            return None
        used = int((root / usage).read_text())
        lines = (line.split() for line in (root / stat).read_text().splitlines())
        cached = next((int(value) for name, value in lines if name == droppable), 0)
        return max(0, int(most) - used + cached)
    return None
