"""What the machine has to have: disk, memory, a compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

from tasks.preflight.finding import Finding

GIB = 2**30


def disk(free: int, needed: int, runs: Path) -> list[Finding]:
    """Bytes free where the artifacts go."""
    if free >= needed:
        return []
    found = f"{free / GIB:.1f} GiB free under {runs}"
    return [Finding("disk", found, f"needs about {needed / GIB:.1f} GiB", "paths.runs=...")]


def memory(available: int, needed: int) -> list[Finding]:
    """Bytes of host memory, for all of this machine's ranks together."""
    if available >= needed:
        return []
    found = f"{available / GIB:.1f} GiB available"
    override = "train.nproc=1 or peft=qlora or zero=zero3 or train.micro_batch_size=1"
    return [Finding("memory", found, f"needs about {needed / GIB:.1f} GiB", override)]


def compiler(offload_optimizer: str, path: str | None) -> list[Finding]:
    """DeepSpeed compiles the optimizer that works in host memory at its first use.

    Nothing else of it is compiled: see `tasks/training/engine.py`.
    """
    if offload_optimizer != "cpu" or path:
        return []
    allowed = "zero.offload_optimizer=cpu compiles DeepSpeed's CPUAdam"
    override = "zero.offload_optimizer=none, or install g++"
    return [Finding("g++", "not found", allowed, override)]


def free_bytes(runs: Path) -> int:
    """Bytes free on the disk that holds `runs`, which need not exist yet."""
    there = next(p for p in (runs, *runs.parents) if p.exists())
    return shutil.disk_usage(there).free


def has_gpu() -> bool:
    """Whether an NVIDIA device is there; asked of the system, since torch takes seconds."""
    return Path("/dev/nvidia0").exists()
