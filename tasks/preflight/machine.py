"""What the machine has to have: disk, memory, a compiler."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tasks.machine import has_gpu
from tasks.preflight.finding import Finding

GIB = 2**30


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
    available: int, states: int, activations: int, *, smaller: Sequence[str], what: str = "memory"
) -> list[Finding]:
    """Memory in bytes: the host's for all of its ranks together, or one GPU's.

    Args:
        available: what can be had without swapping.
        states: libraries, weights, gradients, optimizer: needed in any case.
        activations: at most, when every sample is `train.max_len` long; so this much too little is
            a warning.
        smaller: settings that need less, those that cost least first.
        what: whose memory.
    """
    if available >= states + activations:
        return []
    found, override = f"{available / GIB:.1f} GiB available", " or ".join(smaller)
    if available >= states:
        allowed = f"up to {(states + activations) / GIB:.1f} GiB with the longest samples"
        return [Finding(what, found, allowed, override, "warning")]
    return [Finding(what, found, f"needs about {states / GIB:.1f} GiB", override)]


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


def gpu_bytes() -> int | None:
    """Memory of the smallest GPU, as the driver's own tool says it; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is None or not has_gpu():
        return None
    ask = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    said = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False)
    sizes = [int(line) * 2**20 for line in said.stdout.splitlines() if line.strip().isdigit()]
    return min(sizes, default=None)


def has_half() -> bool:
    """Whether DeepSpeed trains in float16 here."""
    return has_gpu() or "avx512_fp16" in Path("/proc/cpuinfo").read_text(encoding="utf-8")
