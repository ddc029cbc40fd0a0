"""What a user's rewards are now: part of what the result of a run depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.rl.rewards.exact import EXACT_MATCH
from tasks.rl.rewards.reference import FunctionReference

MANIFEST = "manifest.json"


def sources_digest(reward: Mapping[str, Any]) -> str:
    """Of the function's file and of the reward model's folder; empty where neither is named.

    A folder without a manifest is told by the sizes and times of its files.

    Raises:
        ConfigError: the function's file cannot be read.
    """
    parts = []
    if reward["function"] and reward["function"] != EXACT_MATCH:
        parts.append(FunctionReference.of(reward["function"]).digest())
    if reward["model"]:
        parts += _of_folder(Path(reward["model"]).expanduser())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest() if parts else ""


def model_digest(folder: Path) -> str:
    """Of a reward model's folder alone."""
    return hashlib.sha256("\n".join(_of_folder(folder.expanduser())).encode()).hexdigest()


def _of_folder(folder: Path) -> list[str]:
    manifest = folder / MANIFEST
    if manifest.is_file():
        return [hashlib.sha256(manifest.read_bytes()).hexdigest()]
    files = sorted(path for path in folder.glob("*") if path.is_file())
    found = [(path.name, path.stat()) for path in files]
    return [f"{name} {stat.st_size} {stat.st_mtime_ns}" for name, stat in found]
