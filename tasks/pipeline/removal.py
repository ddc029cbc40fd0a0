"""Remove folders of a store, so that a run that starts meanwhile never sees half of one.

A folder is renamed first (`hide`), while no run is in progress, and its files are removed after
that (`remove`). What a killed prune has left is removed by the next one.
"""

from __future__ import annotations

import shutil
import uuid
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError

_HIDDEN = ".pruned"
_PLACES = ("artifacts/*", "checkpoints", "logs", "cache/tokens")
"""Folders, relative to that of the runs, whose entries are removed."""


@dataclass(frozen=True)
class Item:
    """A folder to remove.

    Attributes:
        what: the sort of folder, e.g. "served" or "checkpoints".
        path: the folder.
        used: last use, in seconds since the epoch.
        freed: bytes that its removal frees, after those of the items before it. A file with hard
            links counts where its last link goes.
    """

    what: str
    path: Path
    used: float
    freed: int


def items_of(folders: Iterable[tuple[str, Path, float]]) -> tuple[Item, ...]:
    """Return the items of folders, given as sort, path and last use."""
    links: Counter[tuple[int, int]] = Counter()
    return tuple(Item(what, path, used, _freed(path, links)) for what, path, used in folders)


def hide(items: Iterable[Item]) -> list[Path]:
    """Rename folders, so that no run finds them any more; call it while no run is in progress.

    Returns:
        The folders under their new names, for `remove`.

    Raises:
        ArtifactError: a folder cannot be renamed.
    """
    hidden = []
    for item in items:
        fresh = item.path.with_name(f".{item.path.name}.{uuid.uuid4().hex[:8]}{_HIDDEN}")
        try:
            item.path.rename(fresh)
        except FileNotFoundError:
            continue  # removed by the owner of the folder since
        except OSError as error:
            raise ArtifactError(f"{item.path}: cannot remove it: {error.strerror}") from error
        hidden.append(fresh)
    return hidden


def remove(folders: Iterable[Path]) -> None:
    """Remove folders with all that is in them.

    Raises:
        ArtifactError: a file cannot be removed. The others are.
    """
    problems: list[str] = []

    def note(function: Any, path: str, error: Any) -> None:
        if not isinstance(error[1], FileNotFoundError):
            problems.append(f"{path}: {error[1].strerror}")

    for folder in folders:
        shutil.rmtree(folder, onerror=note)
    if problems:
        raise ArtifactError(f"cannot remove {problems[0]}", details=problems)


def half_removed(runs: Path) -> list[Path]:
    """Return the folders that a killed prune has renamed and not removed."""
    return sorted(path for place in _PLACES for path in runs.glob(f"{place}/.*{_HIDDEN}"))


def _freed(root: Path, links: Counter[tuple[int, int]]) -> int:
    """Return the bytes that removing a folder frees; `links` counts links already gone."""
    freed = 0
    for path in root.rglob("*"):
        stat = path.lstat()
        if path.is_dir() and not path.is_symlink():
            continue
        inode = (stat.st_dev, stat.st_ino)
        links[inode] += 1
        if links[inode] == stat.st_nlink:
            freed += stat.st_size
    return freed
