"""Digests of a user's reward sources, which are part of the key of a training stage."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.disk import file_stats
from tasks.rl.environment.process import reference_of
from tasks.rl.rewards.exact import EXACT_MATCH
from tasks.rl.rewards.reference import FunctionReference

MANIFEST = "manifest.json"


def sources_digest(reward: Mapping[str, Any], environment: str | None = None) -> str:
    """Return the digest of the function's file and the reward model's folder; empty without either.

    A folder without a manifest is identified by sizes, times and inodes of its files.

    Args:
        reward: the section.
        environment: `rl.environment`, whose file is a part too.

    Raises:
        ConfigError: the file of the function or environment cannot be read.
    """
    parts = []
    if environment:
        parts.append(reference_of(environment).digest())
    if reward["function"] and reward["function"] != EXACT_MATCH:
        parts.append(FunctionReference.of(reward["function"]).digest())
    if reward["model"]:
        parts += _folder_parts(Path(reward["model"]).expanduser())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""


def model_digest(folder: Path) -> str:
    """Return the digest of a reward model's folder."""
    return hashlib.sha256("\n".join(_folder_parts(folder.expanduser())).encode()).hexdigest()


def _folder_parts(folder: Path) -> list[str]:
    manifest = folder / MANIFEST
    if manifest.is_file():
        return [hashlib.sha256(manifest.read_bytes()).hexdigest()]
    files = sorted(path for path in folder.glob("*") if path.is_file())
    return [f"{path.name} {file_stats(path)}" for path in files]
