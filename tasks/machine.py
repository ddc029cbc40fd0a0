"""What this machine has, asked of the system: importing torch to ask takes seconds."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
_NAMES = (
    # limit, usage, and how memory.stat calls files that can be dropped: version 2, then 1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat",
     "total_inactive_file"),
)  # fmt: skip


def has_gpu() -> bool:
    """Whether an NVIDIA device is there."""
    return Path("/dev/nvidia0").exists()


def gpu_count() -> int:
    """Return the number of NVIDIA GPUs that CUDA shows to this process."""
    if not has_gpu():
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])


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
