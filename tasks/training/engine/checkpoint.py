"""Checkpoint folders: write, find and delete them. Knows no torch.

    step-00000050/
        engine/         DeepSpeed's checkpoint: fp32 weights, optimizer states, loss scale
        state.json      progress and identity of the run

A checkpoint is written into a folder whose name begins with a dot. One rename makes it visible once
everything is on disk, so existence means complete. Older checkpoints are deleted only after that.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.disk import flush, flush_tree

STATE = "state.json"
ENGINE = "engine"


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
    """A complete checkpoint: its folder, the number of ranks that wrote it, identity, progress."""

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
    return max(complete(root), default=None)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's `state.json`."""
    document = json.loads((path / STATE).read_text())
    progress = Progress.of(document["progress"])
    return Checkpoint(path, document["world_size"], document["identity"], progress)


def work_folder(root: Path, step: int) -> Path:
    """Return the hidden folder in which the checkpoint of a step is written."""
    return root / f".{name_of(step)}.tmp"


def publish(work: Path, *, world_size: int, identity: dict[str, Any], progress: Progress) -> Path:
    """Write `state.json` and make the checkpoint visible, replacing one of the same step."""
    document = {"world_size": world_size, "identity": identity, "progress": asdict(progress)}
    (work / STATE).write_text(json.dumps(document) + "\n")
    final = work.with_name(work.name.removeprefix(".").removesuffix(".tmp"))
    flush_tree(work)
    shutil.rmtree(final, ignore_errors=True)
    work.rename(final)
    flush(final.parent)
    return final


def prune(root: Path, *, keep: set[int], most: int) -> None:
    """Delete the oldest checkpoints until at most `most` are left; 0 keeps all.

    The newest one and those of the steps in `keep` are never deleted.
    """
    folders = complete(root)
    kept = {name_of(step) for step in keep} | {path.name for path in folders[-1:]}
    surplus = len(folders) - most if most else 0
    for path in [path for path in folders if path.name not in kept][: max(0, surplus)]:
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
