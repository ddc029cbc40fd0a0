"""Checkpoints as folders: which are complete, which may go, which is the best. Knows no torch.

    step-00000050/
        engine/         DeepSpeed's own checkpoint: fp32 weights, optimizer, loss scale
        shards/         every rank's share of the trained tensors, as in the `shards` artifact
        partitions.json
        state.json      where the run was, and what it is a run of

A checkpoint is written into a folder whose name begins with a dot and becomes visible by one rename
once everything is on the disk, so that existence means complete. Only then do older ones go.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STATE = "state.json"
ENGINE = "engine"
SHARDS = "shards"
PARTITIONS = "partitions.json"
GB = 10**9


@dataclass
class Best:
    """The best evaluation so far: after which step, and what its metric was."""

    step: int
    value: float


@dataclass
class Progress:
    """Where a run is: what a checkpoint keeps beside the engine's state. The same on every rank.

    Random numbers are not in it: every step begins them anew, from seed, step and rank.

    Attributes:
        step: steps taken.
        losses: of every step.
        last: what was measured in the last step.
        before: the evaluation before the first step.
        evaluations: those after; each with its `step`.
        best: the best of them.
        waited: evaluations since the best one.
        skipped: steps in a row that fp16 overflow has skipped.
        seconds: spent in steps and evaluations.
        kept: what else an objective goes on from, in JSON.
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
        """From what `asdict` made of it."""
        best = document.pop("best")
        return cls(**document, best=None if best is None else Best(**best))


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        path: its folder.
        world_size: ranks that wrote it.
        identity: settings and inputs of the run, by dotted name.
        progress: where the run was.
    """

    path: Path
    world_size: int
    identity: dict[str, Any]
    progress: Progress


def name_of(step: int) -> str:
    """Folder name of the checkpoint of a step."""
    return f"step-{step:08d}"


def complete(root: Path) -> list[Path]:
    """Folders of all complete checkpoints under `root`, by step."""
    return sorted(path.parent for path in root.glob(f"step-????????/{STATE}"))


def last_good(root: Path) -> Path | None:
    """The newest complete checkpoint under `root`, if there is one."""
    found = complete(root)
    return found[-1] if found else None


def open_checkpoint(path: Path) -> Checkpoint:
    """Read what a checkpoint says of itself."""
    document = json.loads((path / STATE).read_text())
    progress = Progress.of(document["progress"])
    return Checkpoint(path, document["world_size"], document["identity"], progress)


def describe(work: Path, *, world_size: int, identity: dict[str, Any], progress: Progress) -> None:
    """Write `state.json`, the last file of a checkpoint."""
    document = {
        "format": 1,
        "world_size": world_size,
        "identity": identity,
        "progress": asdict(progress),
    }
    (work / STATE).write_text(json.dumps(document) + "\n")


def work_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is written."""
    return root / f".{name_of(step)}.tmp"


def publish(work: Path) -> Path:
    """Make a written checkpoint visible, replacing one of the same step. Returns its folder."""
    final = work.with_name(work.name.removeprefix(".").removesuffix(".tmp"))
    to_disk(work)
    shutil.rmtree(final, ignore_errors=True)
    work.rename(final)
    _sync(final.parent)
    return final


def to_disk(folder: Path) -> None:
    """Have everything below `folder` on the disk."""
    for place, _, names in os.walk(folder):
        for name in names:
            _sync(Path(place) / name)
        _sync(Path(place))


def prune(root: Path, *, keep: set[int], most: int, most_gb: float | None) -> None:
    """Remove the oldest checkpoints until there are at most `most`, of `most_gb` GB together.

    Args:
        root: where they lie.
        keep: steps whose checkpoints stay, beside the newest.
        most: how many may stay; 0 for any number.
        most_gb: decimal gigabytes that may stay; None for any size.
    """
    found = complete(root)
    sizes = {path: folder_bytes(path) for path in found}
    kept = {name_of(step) for step in keep} | {path.name for path in found[-1:]}
    for path in found:
        few = not most or len(sizes) <= most
        small = most_gb is None or sum(sizes.values()) <= most_gb * GB
        if few and small:
            return
        if path.name not in kept:
            del sizes[path]
            shutil.rmtree(path)


def forget_after(root: Path, step: int) -> None:
    """Remove what a run that goes on from `step` will write anew, and what was never finished."""
    for path in complete(root):
        if path.name > name_of(step):
            shutil.rmtree(path)
    sweep(root)


def sweep(root: Path) -> None:
    """Remove checkpoints that were never finished."""
    for path in root.glob(".step-????????.tmp"):
        shutil.rmtree(path)


def folder_bytes(folder: Path) -> int:
    """Size of all files below `folder`."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
