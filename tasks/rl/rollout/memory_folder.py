"""A temporary folder that the ranks of a node share, in memory (/dev/shm) if it fits."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tasks.training.engine.deepspeed_engine import Ranks

MEMORY = Path("/dev/shm")
PREFIX = "plumbline-policy-"
_HEADROOM = 1 << 20
"""Bytes for a safetensors header and a configuration."""


def writes_here() -> bool:
    """Return True if this rank writes for its node."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextlib.contextmanager
def memory_folder(ranks: Ranks, nbytes: int, *, root: str | None = None) -> Iterator[Path]:
    """Yield a new folder, the same for all ranks of a node, and delete it afterwards.

    A folder left by a killed run is deleted when the next one begins: its name has the process id.

    Args:
        ranks: all ranks enter and leave together.
        nbytes: size of the content. If memory is too small, the folder is on disk.
        root: parent of the folder instead, which other machines can read, too.
    """
    mine = None
    if writes_here():
        if root is None:
            parent, owner = place_for(nbytes), f"{os.getpid()}"
            sweep(parent)
        else:  # a process of another machine may have the same id
            parent, owner = Path(root).expanduser(), f"{socket.gethostname()}.{os.getpid()}"
            parent.mkdir(parents=True, exist_ok=True)
        mine = tempfile.mkdtemp(prefix=f"{PREFIX}{owner}-", dir=parent)
        if root is not None:
            os.chmod(mine, 0o755)  # the servers may belong to another user
    try:
        node = os.environ.get("GROUP_RANK", "0")
        by_node = {name: path for name, path in ranks.all_objects((node, mine)) if path is not None}
        yield Path(by_node[node])
    finally:
        if mine is not None:
            shutil.rmtree(mine, ignore_errors=True)


def place_for(nbytes: int, memory: Path = MEMORY) -> Path:
    """Return the parent for a folder of this size: memory, or the temporary folder."""
    if os.access(memory, os.W_OK | os.X_OK):
        free = shutil.disk_usage(memory).free
        if free > nbytes + _HEADROOM:
            return memory
    return Path(tempfile.gettempdir())


def sweep(root: Path) -> None:
    """Delete folders whose process no longer exists."""
    for path in root.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)
