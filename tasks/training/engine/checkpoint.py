"""Checkpoint folders: write, find and delete them. Knows no torch.

    step-00000050/
        engine/         DeepSpeed's checkpoint: fp32 weights, optimizer states, loss scale
        shards/         every rank's partitions of the trained tensors, as in the `shards` artifact
        partitions.json
        state.json      progress and identity of the run, size and hash of every other file

A checkpoint is written into a folder whose name begins with a dot. One rename makes it visible once
everything is on disk, so existence means complete. Older checkpoints are deleted only after that.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from blake3 import blake3

from tasks.core.disk import flush, flush_tree

STATE = "state.json"
ENGINE = "engine"
SHARDS = "shards"
PARTITIONS = "partitions.json"
GB = 10**9


@dataclass
class Best:
    """The best evaluation so far: its step and the value of its metric."""

    step: int
    value: float


@dataclass
class Progress:
    """Progress of a run, stored in checkpoints beside the engine's state. Equal on every rank.

    It holds no generator states: every step seeds its random numbers from seed, step and rank.

    Attributes:
        step: steps taken.
        losses: one per step.
        last: metrics of the last step.
        before: the evaluation before the first step.
        evaluations: later evaluations, each with its `step`.
        best: the best of them.
        waited: evaluations since the best one.
        skipped: consecutive steps skipped because fp16 overflowed.
        seconds: time spent in steps.
        kept: further state of an objective, as JSON values.
    """

    step: int = 0
    losses: list[float] = field(default_factory=list)
    last: dict[str, float] = field(default_factory=dict)
    before: dict[str, float] | None = None
    evaluations: list[dict[str, float]] = field(default_factory=list)
    best: Best | None = None
    waited: int = 0
    skipped: int = 0
    seconds: float = 0.0
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, document: dict[str, Any]) -> Progress:
        """Build from the result of `dataclasses.asdict`."""
        best = document.pop("best")
        return cls(**document, best=None if best is None else Best(**best))


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        world_size: number of ranks that wrote it.
        identity: settings and inputs of the run, by dotted name.
        progress: progress of the run at that point.
    """

    path: Path
    world_size: int
    identity: dict[str, Any]
    progress: Progress


def name_of(step: int) -> str:
    """Return the folder name of the checkpoint of a step."""
    return f"step-{step:08d}"


def complete(root: Path) -> list[Path]:
    """Return the folders of all complete checkpoints under `root`, in order of their steps."""
    return sorted(path.parent for path in root.glob(f"step-????????/{STATE}"))


def last_good(root: Path) -> Path | None:
    """Return the newest complete checkpoint under `root`, or None."""
    folders = complete(root)
    return folders[-1] if folders else None


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's `state.json`."""
    document = json.loads((path / STATE).read_text())
    progress = Progress.of(document["progress"])
    return Checkpoint(path, document["world_size"], document["identity"], progress)


def file_names(folder: Path) -> list[str]:
    """Return the relative paths of all files of a checkpoint but `state.json`, sorted."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if name != STATE)


def hash_files(folder: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return size and BLAKE3 of files of a checkpoint, by relative path."""
    return {
        name: {
            "size": (folder / name).stat().st_size,
            "blake3": blake3(max_threads=blake3.AUTO).update_mmap(folder / name).hexdigest(),
        }
        for name in names
    }


def differences(folder: Path) -> list[str]:
    """Compare a checkpoint with the list in its `state.json`; every byte is read.

    Returns:
        One text per difference; empty if the files are those that were written.
    """
    listed = json.loads((folder / STATE).read_text()).get("files")
    if not isinstance(listed, dict):
        return [f"{STATE} lists no files: an older version or another program wrote it"]
    present = hash_files(folder, file_names(folder))
    problems = [f"{name}: not in {STATE}" for name in present.keys() - listed.keys()]
    problems += [f"{name}: missing" for name in listed.keys() - present.keys()]
    problems += [
        f"{name}: other bytes than those that were written"
        for name in present.keys() & listed.keys()
        if present[name] != listed[name]
    ]
    return sorted(problems)


def describe(
    work: Path,
    *,
    world_size: int,
    identity: dict[str, Any],
    progress: Progress,
    files: dict[str, dict[str, Any]],
) -> None:
    """Write `state.json`, the last file of a checkpoint; `files` as `hash_files` returns it."""
    document = {
        "format": 1,
        "files": files,
        "world_size": world_size,
        "identity": identity,
        "progress": asdict(progress),
    }
    (work / STATE).write_text(json.dumps(document) + "\n")


def work_folder(root: Path, step: int) -> Path:
    """Return the hidden folder in which the checkpoint of a step is written."""
    return root / f".{name_of(step)}.tmp"


def publish(work: Path) -> Path:
    """Make a written checkpoint visible, replacing one of the same step; return its folder."""
    final = work.with_name(work.name.removeprefix(".").removesuffix(".tmp"))
    flush_tree(work)
    shutil.rmtree(final, ignore_errors=True)
    work.rename(final)
    flush(final.parent)
    return final


def prune(root: Path, *, keep: set[int], most: int, most_gb: float | None) -> None:
    """Delete the oldest checkpoints until at most `most` of at most `most_gb` GB are left.

    Args:
        root: folder of the checkpoints.
        keep: steps whose checkpoints are never deleted; nor is the newest one.
        most: number of checkpoints to keep; 0 for any number.
        most_gb: decimal gigabytes to keep; None for any size.
    """
    folders = complete(root)
    sizes = {path: folder_bytes(path) for path in folders}
    kept = {name_of(step) for step in keep} | {path.name for path in folders[-1:]}
    for path in folders:
        few = not most or len(sizes) <= most
        small = most_gb is None or sum(sizes.values()) <= most_gb * GB
        if few and small:
            return
        if path.name not in kept:
            del sizes[path]
            shutil.rmtree(path)


def forget_after(root: Path, step: int) -> None:
    """Delete checkpoints of steps after `step`, and unfinished ones."""
    for path in complete(root):
        if path.name > name_of(step):
            shutil.rmtree(path)
    sweep(root)


def sweep(root: Path) -> None:
    """Delete unfinished checkpoints."""
    for path in root.glob(".step-????????.tmp"):
        shutil.rmtree(path)


def folder_bytes(folder: Path) -> int:
    """Return the size of all files below `folder`, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
