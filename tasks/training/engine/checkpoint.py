"""Checkpoint folders: write, find, delete and resume from them. Knows no torch.

    step-00000050/
        engine/         DeepSpeed's checkpoint: fp32 weights, optimizer states, loss scale
        state.json      progress and identity of the run

A checkpoint is written into a folder whose name begins with a dot. One rename makes it visible once
everything is on disk, so existence means complete. Older checkpoints are deleted only after that.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tasks.core.errors import ConfigError
from tasks.core.files import flush, flush_tree
from tasks.training.job import Settings, TrainJob

STATE = "state.json"
ENGINE = "engine"
FREE = (
    "launch", "evaluate.eval_steps", "evaluate.early_stop_patience", "evaluate.keep", "log_every",
    "save_steps", "max_ckpt_num", "probes", "batch.micro_batch_size", "gradient_checkpointing",
    "gradient_checkpointing_reentrant", "zero.bucket_size", "zero.overlap_comm",
    "trust_remote_code", "online.rollout.servers", "online.rollout.urls", "online.rollout.threads",
    "online.rollout.sync_dir",
)  # fmt: skip
"""Settings that may differ in a resumed run: they leave the result as it is, up to the order of
sums. `train.best_metric` may not: values before and after the interruption are compared."""
_AGAIN = "train.resume=never starts from the beginning"


@dataclass
class Best:
    """The best evaluation so far: its step and the value of its metric."""

    step: int
    value: float


@dataclass
class Progress:
    """Progress of a run, stored in checkpoints beside the engine's state. Equal on every rank.

    It has no generator states: every step seeds its random numbers from seed, step and rank.
    """

    step: int = 0  # steps taken
    losses: list[float] = field(default_factory=list)  # one per step
    last: dict[str, float] = field(default_factory=dict)  # metrics of the last step
    before: dict[str, float] | None = None  # the evaluation before the first step
    # later evaluations, each with its `step`
    evaluations: list[dict[str, float]] = field(default_factory=list)
    best: Best | None = None  # the best of them
    waited: int = 0  # evaluations since the best one
    skipped: int = 0  # consecutive steps skipped because fp16 overflowed
    seconds: float = 0.0  # time spent in steps
    # further state of an objective, as JSON values
    kept: dict[str, Any] = field(default_factory=dict)


class Checkpoint(NamedTuple):
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


def last_good_of(job: TrainJob) -> str:
    """Return the end of an error's message: the checkpoint that a run can go on from."""
    return f"last good checkpoint: {last_good(job.checkpoints) or 'none yet'}"


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's `state.json`."""
    document = json.loads((path / STATE).read_text())
    progress = Progress(**document["progress"])
    if progress.best is not None:
        progress.best = Best(**document["progress"]["best"])
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


def sweep(root: Path, after: int | None = None) -> None:
    """Delete unfinished checkpoints, and those of steps after `after`."""
    newer = [p for p in complete(root) if after is not None and p.name > name_of(after)]
    for path in [*root.glob(".step-????????.tmp"), *newer]:
        shutil.rmtree(path)


def identity(
    settings: Settings, *, base_digest: str, data: Path, adapter: Path | None = None
) -> dict[str, Any]:
    """Return everything that determines a run's result, by dotted name."""
    parts: dict[str, Any] = {"base": base_digest, "data": _folder_digest(data)}
    if adapter is not None:
        parts["adapter"] = _folder_digest(adapter)
    for name, value in _flat(asdict(settings)).items():
        if not any(name == free or name.startswith(f"{free}.") for free in FREE):
            parts[name] = list(value) if isinstance(value, tuple) else value
    if url := settings.reward_url:  # it may hold a secret that only `redact` knows
        parts["online.reward.url"] = hashlib.sha256(url.encode()).hexdigest()
    return parts


def begin(
    job: TrainJob, how: str, *, to_universal: Callable[[Path, Path], object]
) -> tuple[TrainJob, Progress]:
    """Choose the start of a run (`train.resume`, see `choose`), and remove later checkpoints.

    Returns the job with the checkpoint to resume from, if any, and the progress at that point.
    `to_universal` converts a checkpoint (first folder) to universal form; it is called only if the
    number of ranks has changed.
    """
    saved = choose(how, job.checkpoints, job.identity)
    if saved is None:
        sweep(job.checkpoints, after=0)
        shutil.rmtree(job.checkpoints / "tokens", ignore_errors=True)
        return job, Progress()
    # Without ZeRO every rank has the whole optimizer state, so their number does not matter.
    moved = saved.world_size != job.settings.world_size and job.settings.zero.stage > 0
    if problem := _cannot_go_on(saved, job, moved=moved):
        raise ConfigError(f"train.resume: {saved.path}: {problem}", hint=_AGAIN)
    sweep(job.checkpoints, after=saved.progress.step)
    job = replace(job, resume=saved.path)
    if moved:
        universal = job.checkpoints / "universal"
        shutil.rmtree(universal, ignore_errors=True)
        to_universal(saved.path, universal)
        job = replace(job, universal=universal)
    return job, saved.progress


def choose(how: str, root: Path, wanted: Mapping[str, Any]) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None to start from the beginning.

    `how` is `auto` for the newest checkpoint under `root`, the folder of this run's checkpoints,
    if there is one; `never` for none; or a folder as in `named`. ConfigError if the checkpoint's
    identity differs from `wanted`.
    """
    if how == "never":
        return None
    path = last_good(root) if how == "auto" else named(how, root.parent)
    if path is None:
        return None
    saved = open_checkpoint(path)
    differs = [
        f"{name}: this run has {wanted.get(name)}, the checkpoint {saved.identity.get(name)}"
        for name in sorted(set(wanted) | set(saved.identity))
        if wanted.get(name) != saved.identity.get(name)
    ]
    if differs:
        raise ConfigError(
            f"{path} is a checkpoint of another run: {len(differs)} settings differ, "
            f"first {differs[0]}",
            details=differs,
            hint=f"{_AGAIN}; or restore these settings",
        )
    return saved


def named(folder: str, ours: Path) -> Path:
    """Return a folder if it is a checkpoint, else the newest checkpoint in it.

    Raises ConfigError for a folder outside of `ours`, the checkpoints of all runs: DeepSpeed
    unpickles a checkpoint, which runs code that it may contain.
    """
    path = Path(folder).expanduser().resolve()
    chosen = path if (path / STATE).is_file() else last_good(path)
    if chosen is None or not chosen.is_relative_to(ours.resolve()):
        problem = "has no complete checkpoint" if chosen is None else f"is not in {ours}"
        hint = f"a folder {ours}/*/step-????????, or train.resume=auto or never"
        raise ConfigError(f"train.resume={folder} {problem}", hint=hint)
    return chosen


def _cannot_go_on(saved: Checkpoint, job: TrainJob, *, moved: bool) -> str:
    """Return the reason why a run cannot go on from a checkpoint; "" if it can."""
    settings, best = job.settings, saved.progress.best
    if moved and settings.optim.optimizer != "adamw":
        return (
            f"states of train.optimizer={settings.optim.optimizer} cannot be converted from "
            f"{saved.world_size} ranks to {settings.world_size}"
        )
    if settings.evaluate.keep != "best" or not best:
        return ""
    if moved:
        return f"train.keep=best needs the checkpoint of {saved.world_size} ranks as it is"
    path = job.checkpoints / name_of(best.step)
    if best.step != saved.progress.step and not path.is_dir():
        return f"train.keep=best, and the best checkpoint so far does not exist: {path}"
    return ""


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _folder_digest(folder: Path) -> str:
    """Return the SHA-256 of names and contents of a folder's files, its manifest left out."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file() and p.name != "manifest.json"):
        with path.open("rb") as file:
            digest.update(path.name.encode())
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
