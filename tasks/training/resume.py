"""Where a run begins: anew, or from a checkpoint that is one of this very run. Knows no torch."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError
from tasks.training.engine import checkpoint
from tasks.training.engine.checkpoint import Checkpoint, Progress
from tasks.training.job import Settings, TrainJob

FREE = (
    "launch", "evaluate.eval_steps", "evaluate.early_stop_patience", "evaluate.keep", "log_every",
    "save_steps", "max_ckpt_num", "max_ckpt_gb", "probes", "batch.micro_batch_size",
    "gradient_checkpointing", "gradient_checkpointing_reentrant", "zero.bucket_size",
    "zero.overlap_comm", "trust_remote_code",
)  # fmt: skip
"""Settings that may change when a run goes on: they do not change what it computes, or only how
its sums are grouped. What the best state is best in may not: its value is compared with others."""


def identity(
    settings: Settings, *, base_digest: str, data: Path, adapter: Path | None = None
) -> dict[str, Any]:
    """Return everything that decides a run's result, by dotted name."""
    found: dict[str, Any] = {"base": base_digest, "data": _folder_digest(data)}
    if adapter is not None:
        found["adapter"] = _folder_digest(adapter)
    for name, value in _flat(asdict(settings)).items():
        if not any(name == free or name.startswith(f"{free}.") for free in FREE):
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def choose(how: str, root: Path, wanted: Mapping[str, Any]) -> Checkpoint | None:
    """The checkpoint to go on from; None to begin anew.

    Args:
        how: `auto` takes the newest checkpoint under `root`, if there is one; `never` none; all
            else is a checkpoint's folder, or a folder of checkpoints, whose newest is taken.
        root: folder of this run's checkpoints.
        wanted: `identity` of the run.

    Raises:
        ConfigError: there is no checkpoint where one is asked for, or it is another run's; what
            differs is named.
    """
    if how == "never":
        return None
    path = checkpoint.last_good(root) if how == "auto" else _asked_for(Path(how).expanduser())
    if path is None:
        return None
    found = checkpoint.open_checkpoint(path)
    differs = _differences(wanted, found.identity)
    if differs:
        raise ConfigError(
            f"{path} is a checkpoint of another run: {len(differs)} settings differ, "
            f"first {differs[0]}",
            details=differs,
            hint="train.resume=never begins anew; or set back what differs",
        )
    return found


def begin(
    job: TrainJob, how: str, *, to_universal: Callable[[Path, Path], object]
) -> tuple[TrainJob, Progress]:
    """Settle where a run begins, and clear away what it will write anew.

    Args:
        job: what to do.
        how: see `choose`.
        to_universal: makes a universal checkpoint of DeepSpeed's; called with both folders where
            the number of ranks has changed.

    Returns:
        The job with what it goes on from, and where that is.

    Raises:
        ConfigError: as `choose`; or the best checkpoint so far is asked for and gone.
    """
    found = choose(how, job.checkpoints, job.identity)
    if found is None:
        checkpoint.forget_after(job.checkpoints, 0)
        return job, Progress()
    _bring_best(found, job)
    checkpoint.forget_after(job.checkpoints, found.progress.step)
    job = replace(job, resume=found.path)
    # Without ZeRO every rank has all of the optimizer, and any number of them can take it.
    if found.world_size != job.settings.world_size and job.settings.zero.stage:
        _require_convertible(found, job.settings)
        universal = job.checkpoints / "universal"
        shutil.rmtree(universal, ignore_errors=True)
        to_universal(found.path / checkpoint.ENGINE, universal)
        job = replace(job, universal=universal)
    return job, found.progress


def _require_convertible(found: Checkpoint, settings: Settings) -> None:
    """DeepSpeed's converter knows the two moments of Adam, by name and whole."""
    if settings.optim.optimizer != "adamw":
        raise ConfigError(
            f"{found.path} was written by {found.world_size} ranks, and the states of "
            f"train.optimizer={settings.optim.optimizer} cannot be dealt to "
            f"{settings.world_size}",
            hint=f"go on with {found.world_size} ranks (train.nproc, train.nodes), or begin anew: "
            "train.resume=never",
        )


def _bring_best(found: Checkpoint, job: TrainJob) -> None:
    """Have the best checkpoint of a run that went on elsewhere where this one will look for it."""
    best = found.progress.best
    if best is None or found.path.parent == job.checkpoints:
        return
    source = found.path.with_name(checkpoint.name_of(best.step))
    if source.is_dir():
        work = checkpoint.work_folder(job.checkpoints, best.step)
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(source, work)
        checkpoint.publish(work)
    elif job.settings.evaluate.keep == "best":
        raise ConfigError(
            f"train.keep=best, and the best checkpoint so far, {source}, is not there",
            hint="train.keep=last, or train.resume=never",
        )


def newest(path: Path) -> Path | None:
    """The checkpoint that a path names: itself, or the newest of those in it."""
    return path if (path / checkpoint.STATE).is_file() else checkpoint.last_good(path)


def _asked_for(path: Path) -> Path:
    found = newest(path)
    if found is None:
        what = "holds no complete checkpoint" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"train.resume={path} {what}",
            hint="name a folder step-????????, or train.resume=auto or never",
        )
    return found.resolve()


def _differences(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Lines `name: asked, stored`; a name that one side does not have counts as null there."""
    names = sorted(set(wanted) | set(found))
    return [
        f"{name}: this run has {_shown(wanted.get(name))}, the checkpoint {_shown(found.get(name))}"
        for name in names
        if wanted.get(name) != found.get(name)
    ]


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


def _flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = value
    return found


def _folder_digest(folder: Path) -> str:
    """Of names and contents of a dataset's files; its manifest tells of how they were made."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.iterdir() if p.is_file() and p.name != "manifest.json"):
        with path.open("rb") as file:
            digest.update(path.name.encode())
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
