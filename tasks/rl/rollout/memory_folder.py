"""A folder that a node's ranks share for a moment, in memory where the machine has such a place."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tasks.training.engine.deepspeed_engine import Ranks

MEMORY = Path("/dev/shm")
PREFIX = "plumbline-policy-"
_HEADROOM = 1 << 20
"""Bytes beside the tensors: a header, a configuration."""


def writes_here() -> bool:
    """Whether this rank is the one of its node that writes."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


@contextlib.contextmanager
def memory_folder(ranks: Ranks, nbytes: int) -> Iterator[Path]:
    """A new folder, the same one for all ranks of a node; deleted afterwards, come what may.

    What a killed run may have left is deleted when the next one begins: the name tells the process.

    Args:
        ranks: all of them enter and leave it together.
        nbytes: that it has to hold; without so much memory it lies in the temporary folder.
    """
    mine = None
    if writes_here():
        root = place_for(nbytes)
        sweep(root)
        mine = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root)
    try:
        node = os.environ.get("GROUP_RANK", "0")
        told = {where: path for where, path in ranks.all_objects((node, mine)) if path is not None}
        yield Path(told[node])
    finally:
        if mine is not None:
            shutil.rmtree(mine, ignore_errors=True)


def place_for(nbytes: int, memory: Path = MEMORY) -> Path:
    """Where a folder of this size belongs: memory, or the temporary folder."""
    if os.access(memory, os.W_OK | os.X_OK):
        free = shutil.disk_usage(memory).free
        if free > nbytes + _HEADROOM:
            return memory
    return Path(tempfile.gettempdir())


def sweep(root: Path) -> None:
    """Delete folders of processes of ours that are no more."""
    for path in root.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)
