"""Whether all ranks run the same program on the same numbers; asked where there are several nodes.

A node with another version of torch or of this project trains something else without a word, or
hangs in a collective that the others do not make.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks.core.errors import TrainingError
from tasks.training.engine.deepspeed_engine import Ranks

PACKAGES = ("torch", "transformers", "peft", "deepspeed", "accelerate", "bitsandbytes")
_TASKS = Path(__file__).resolve().parents[2]


def require_alike(ranks: Ranks) -> None:
    """Compare versions and the project's own code over all ranks.

    Raises:
        TrainingError: on every rank, naming what differs and where.
    """
    told = ranks.all_objects({name: _version(name) for name in PACKAGES} | {"tasks": _code()})
    found = [
        f"rank {rank}: {name} is {mine[name]}, on rank 0 {told[0][name]}"
        for rank, mine in enumerate(told)
        for name in mine
        if mine[name] != told[0][name]
    ]
    if found:
        raise TrainingError(
            f"the nodes do not run the same program: {found[0]}",
            details=found,
            hint="install the same lock on every node: make setup",
        )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _code() -> str:
    digest = hashlib.sha256()
    for path in sorted(_TASKS.rglob("*.py")):
        digest.update(str(path.relative_to(_TASKS)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
