"""Checks of the machine: GPUs that torch can use, disk, memory, a compiler."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from tasks.config.checks.finding import Finding
from tasks.core import machine as host

GIB = 2**30


def device(asked: str, nproc: int, *, embedded: bool = False) -> list[Finding]:
    """Ranks that would not compute where they should, or more of them than GPUs.

    Args:
        asked: `train.device`.
        nproc: ranks of this node.
        embedded: whether the model is the embedded one, which is made for CPUs: a warning will do.
    """
    count, (torch, built) = host.gpu_count(), host.torch_build()
    if asked == "cpu":
        return []
    if count == 0:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "cuda without a GPU" + ("" if shown is None else f": CUDA_VISIBLE_DEVICES={shown}")
        allowed = "the driver (NVML, nvidia-smi) lists none that is visible"
        return [Finding("train.device", seen, allowed, "train.device=cpu")] * (asked == "cuda")
    if built is None:
        seen = f"{count} GPU{'s' * (count > 1)}, and torch {torch} is a CPU build"
        allowed = "training would run on the CPU; a CUDA build of torch computes on them"
        override = "make setup PROFILE=cuda VENV=.venv-cuda, or train.device=cpu"
        severity: Literal["error", "warning"] = "warning" if embedded else "error"
        return [Finding("train.device", seen, allowed, override, severity)]
    if (old := host.driver_too_old()) is not None:
        return [Finding("train.device", *old)]
    if nproc > count:
        allowed = f"a GPU for each rank, and {count} {'is' if count == 1 else 'are'} visible"
        return [Finding("train.nproc", str(nproc), allowed, f"train.nproc={count}")]
    return []


def disk(free: int, needed: int, runs: Path) -> list[Finding]:
    """Bytes free where the artifacts go."""
    if free >= needed:
        return []
    found = f"{free / GIB:.1f} GiB free under {runs}"
    return [Finding("disk", found, f"needs about {needed / GIB:.1f} GiB", "paths.runs=...")]


def checkpoints(parameters: int, *, most: int, most_gb: float | None) -> int:
    """Bytes of the checkpoints of a full training of so many parameters.

    Each has the weights twice in 16 bits (DeepSpeed's and ours), fp32 weights and two moments. The
    best and the newest may stay in addition to `most` (0: any number; four are reckoned with) or to
    `most_gb` (10^9 bytes).
    """
    each = 16 * parameters
    together = (most or 4) * each
    if most_gb is not None:
        together = min(together, int(most_gb * 10**9))
    return together + 2 * each


def memory(
    available: int,
    states: int,
    activations: int,
    *,
    smaller: Sequence[str],
    what: str = "memory",
    needs: str = "",
) -> list[Finding]:
    """Memory in bytes: the host's for all of its ranks together, or one GPU's.

    Args:
        available: what can be had without swapping.
        states: libraries, weights, gradients, optimizer: needed in any case.
        activations: at most, when every sample is `train.max_len` long; so this much too little is
            a warning.
        smaller: settings that need less, those that cost least first.
        what: whose memory.
        needs: what it consists of, in words.
    """
    if available >= states + activations:
        return []
    found, override = f"{available / GIB:.1f} GiB available", " or ".join(smaller)
    if available >= states:
        allowed = f"up to {(states + activations) / GIB:.1f} GiB with the longest samples{needs}"
        return [Finding(what, found, allowed, override, "warning")]
    return [Finding(what, found, f"needs about {states / GIB:.1f} GiB{needs}", override)]


def compiler(offload_optimizer: str, path: str | None) -> list[Finding]:
    """DeepSpeed compiles the optimizer that works in host memory at its first use.

    Nothing else of it is compiled: see `tasks/training/engine/deepspeed_engine.py`.
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


def has_half(*, gpu: bool) -> bool:
    """Return True if DeepSpeed trains in float16: on a GPU, or on a CPU that computes in it."""
    return gpu or "avx512_fp16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
