"""Hardware of this machine, read from the system: importing torch for it takes seconds.

GPUs are NVML's word, as `nvidia-ml-py` reads it, or `nvidia-smi`'s where that is not installed: a
device file proves nothing (WSL has none, a container may have /dev/nvidia3 alone, MIG has others).
Tests replace `listed`, and everything here follows.
"""

from __future__ import annotations

import os
import platform
import re
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
    # limit, usage, and how memory.stat calls files that can be dropped: version 2, then 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
     "total_inactive_file"),
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of one that MIG divides.

    Attributes:
        uuid: as in CUDA_VISIBLE_DEVICES: "GPU-..." or "MIG-...".
        memory: bytes.
        instances: of a GPU in MIG mode, those that it is divided into.
    """

    uuid: str
    memory: int
    instances: tuple[Gpu, ...] = ()


@dataclass(frozen=True)
class Gpus:
    """GPUs of this machine or container, and their driver.

    Attributes:
        devices: in the driver's order.
        driver: version, such as "580.65.06"; empty where it is not known.
        cuda: the newest CUDA that the driver runs, such as (13, 0); None where it is not known.
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
    except nvml.NVMLError:  # it shares the host's
        memory = psutil.virtual_memory().total
    return Gpu(nvml.nvmlDeviceGetUUID(handle), memory, tuple(_instances(nvml, handle)))


def _instances(nvml: Any, handle: Any) -> list[Gpu]:
    """MIG devices of a GPU; none where it is not in that mode, or cannot be."""
    found: list[Gpu] = []
    try:
        places = nvml.nvmlDeviceGetMigMode(handle)[0] and nvml.nvmlDeviceGetMaxMigDeviceCount(
            handle
        )
    except nvml.NVMLError:  # no such mode
        return found
    for index in range(places):
        with suppress(nvml.NVMLError):  # nothing in this place
            found.append(_device(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
    return found


def _of_tool(tool: str | None) -> Gpus:
    if tool is None:
        return Gpus()
    ask = [tool, "--query-gpu=uuid,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return Gpus()
    rows = [line.split(", ") for line in done.stdout.splitlines() if line.startswith("GPU-")]
    shared = psutil.virtual_memory().total  # of a GPU that has no memory of its own: "[N/A]"
    devices = (Gpu(u, int(size) * 2**20 if size.isdigit() else shared) for u, size, _ in rows)
    return Gpus(tuple(devices), rows[0][2] if rows else "")


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA shows to this process."""
    return visible(listed().devices, os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible(devices: Sequence[Gpu], wanted: str | None) -> tuple[Gpu, ...]:
    """Return the devices that CUDA_VISIBLE_DEVICES leaves, in its order.

    As CUDA reads it (torch 2.13, `torch/cuda/__init__.py`, `_parse_visible_devices`): numbers, or
    beginnings of UUIDs; the first entry that names no device ends the list, a device that is named
    twice empties it. A process sees one MIG instance at most.

    Args:
        devices: all there are.
        wanted: the variable; None where it is not set.
    """
    if wanted is None:
        names = [str(number) for number in range(len(devices))]
    else:
        names = [name.strip() for name in wanted.split(",")]
    found: list[Gpu] = []
    for name in names:
        device = _named(devices, name)
        if device is None:
            break
        if device in found:
            return ()
        found.append(device)
        if device.uuid.startswith("MIG-"):
            return (device,) if len(found) == 1 else tuple(found[:-1])
    return tuple(found)


def _named(devices: Sequence[Gpu], name: str) -> Gpu | None:
    """The device of a number or UUID. Of a GPU in MIG mode CUDA takes the first instance."""
    if name.startswith(("GPU-", "MIG-")):
        every = [*devices, *(part for one in devices for part in one.instances)]
        chosen = [one for one in every if one.uuid.startswith(name)]
    else:
        digits = re.match(r"\d+", name)  # as strtoul: "1gpu" is 1, "-1" and words are none
        chosen = list(devices[int(digits[0]) :][:1]) if digits else []
    if len(chosen) != 1:
        return None
    return chosen[0].instances[0] if chosen[0].instances else chosen[0]


def has_gpu(device: str = "auto") -> bool:
    """Return True if torch computes on GPUs here: some are visible, and it is a CUDA build.

    Args:
        device: `train.device`, where it is about the ranks.
    """
    return device != "cpu" and bool(gpus()) and torch_build()[1] is not None


def gpu_count() -> int:
    """Return the number of GPUs that CUDA shows to this process."""
    return len(gpus())


def gpu_memory(device: str = "auto") -> int | None:
    """Return the bytes of the smallest visible GPU; None where torch computes on none."""
    return min(one.memory for one in gpus()) if has_gpu(device) else None


OLDEST_DRIVER = {12: 525, 13: 580}
"""Driver branch that each major version of CUDA needs on Linux, by CUDA's release notes."""


def torch_build() -> tuple[str, tuple[int, int] | None]:
    """Return torch's version, and the CUDA that it was built for; None for a CPU build.

    Read from the installed `torch/version.py`. The version is "0" where torch is not installed.
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
    """Return why the driver is too old for torch: found, needed, what to type; None if it is not.

    CUDA runs on any driver of its major version (minor version compatibility).
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
    """Return what decides the order and rounding of a model's sums: where it is equal, bits are.

    Args:
        device: torch device that computes.
        attention: transformers' name of the attention implementation.
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
    """Return the CPU's name; its architecture where the system does not say."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.machine()


def available_memory() -> int:
    """Bytes that can be had without swapping: the machine's, or the container's where it has less.

    A container is told the whole machine's memory and killed at its own limit.
    """
    free = int(psutil.virtual_memory().available)
    left = left_in_container(CGROUP)
    return free if left is None else min(free, left)


def left_in_container(root: Path) -> int | None:
    """Bytes that a control group may still take; None where nothing limits it.

    Args:
        root: where its files are mounted.
    """
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
