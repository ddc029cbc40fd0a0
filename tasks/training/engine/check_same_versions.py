"""Check that all nodes run the same versions of the libraries and of this project.

A node with other versions trains another model without an error, or waits in a collective that the
other ranks never enter.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tasks.core.errors import TrainingError
from tasks.training.engine.deepspeed_engine import Ranks

PACKAGES = ("torch", "transformers", "peft", "deepspeed", "accelerate", "bitsandbytes")
_TASKS = Path(__file__).resolve().parents[2]


def require_same_versions(ranks: Ranks) -> None:
    """Compare the versions of libraries, and the digest of this project's code, over all ranks.

    Raises:
        TrainingError: versions differ; raised on every rank, with rank and version.
    """
    versions = ranks.all_objects({name: _version(name) for name in PACKAGES} | {"tasks": _code()})
    differences = [
        f"rank {rank}: {name} is {version_here}, on rank 0 {versions[0][name]}"
        for rank, of_rank in enumerate(versions)
        for name, version_here in of_rank.items()
        if version_here != versions[0][name]
    ]
    if differences:
        raise TrainingError(
            f"the nodes do not run the same program: {differences[0]}",
            details=differences,
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
