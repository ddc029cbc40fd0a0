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


def memory(available: int, states: int, activations: int) -> list[Finding]:
    """Host memory in bytes, for all of this machine's ranks together.

    Args:
        available: what can be had without swapping.
        states: libraries, weights, gradients, optimizer: needed in any case.
        activations: at most, when every sample is `train.max_len` long; so this much too little is
            a warning.
    """
    if available >= states + activations:
        return []
    found = f"{available / GIB:.1f} GiB available"
    if available >= states:
        allowed = f"up to {(states + activations) / GIB:.1f} GiB with the longest samples"
        override = "train.micro_batch_size=1 or train.gradient_checkpointing=true"
        return [Finding("memory", found, allowed, override, "warning")]
    override = "train.nproc=1 or peft=qlora or zero=zero3"
    return [Finding("memory", found, f"needs about {states / GIB:.1f} GiB", override)]


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
