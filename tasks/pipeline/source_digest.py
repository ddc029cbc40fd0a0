"""Digest of the source of package `tasks`: the code part of every cache key."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

TASKS = Path(__file__).resolve().parents[1]


@cache
def source_digest() -> str:
    """Return the SHA-256 of all files of package `tasks`: their paths and bytes, sorted by path.

    A changed comment runs stages again; which lines decide the numbers of a stage is not guessed.
    """
    digest = hashlib.sha256()
    for path in sorted(TASKS.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            name = path.relative_to(TASKS).as_posix()
            digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
