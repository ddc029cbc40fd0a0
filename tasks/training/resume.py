"""Start of a run: from the beginning, or from a checkpoint of the same run. Knows no torch."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, ConfigError
from tasks.training.engine import checkpoint
from tasks.training.engine.checkpoint import Checkpoint, Progress
from tasks.training.job import Settings, TrainJob
from tasks.weights.pickled.scan import TENSORS, Scanner

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
    if url := settings.reward_url:  # a checkpoint must not contain it
        parts["online.reward.url"] = hashlib.sha256(url.encode()).hexdigest()
    return parts


def begin(
    job: TrainJob, how: str, *, to_universal: Callable[[Path, Path], object]
) -> tuple[TrainJob, Progress]:
    """Choose the start of a run, and remove the checkpoints after it.

    Args:
        job: settings and paths of the run.
        how: `train.resume`, see `choose`.
        to_universal: converts a checkpoint (first folder) to universal form; called only if the
            number of ranks has changed.

    Returns:
        The job with the checkpoint to resume from, if any, and the progress at that point.

    Raises:
        ConfigError: as `choose`; or the run needs states that cannot be brought along.
    """
    saved = choose(how, job.checkpoints, job.identity)
    if saved is None:
        checkpoint.forget_after(job.checkpoints, 0)
        shutil.rmtree(job.checkpoints / "tokens", ignore_errors=True)
        return job, Progress()
    # Without ZeRO every rank has the whole optimizer state, so their number does not matter.
    settings = job.settings
    moved = saved.world_size != settings.world_size and settings.zero.stage > 0
    if moved:
        _require_convertible(saved, settings)
    _require_best(saved, job)
    checkpoint.forget_after(job.checkpoints, saved.progress.step)
    job = replace(job, resume=saved.path)
    if moved:
        universal = job.checkpoints / "universal"
        shutil.rmtree(universal, ignore_errors=True)
        to_universal(saved.path, universal)
        job = replace(job, universal=universal)
    return job, saved.progress


def choose(how: str, root: Path, wanted: Mapping[str, Any]) -> Checkpoint | None:
    """Return the checkpoint to resume from, or None to start from the beginning.

    Args:
        how: `auto` takes the newest checkpoint under `root`, if any; `never` takes none; anything
            else is the path of a checkpoint, or of a folder whose newest is taken. DeepSpeed
            unpickles it, so such a checkpoint is scanned for code first.
        root: folder of this run's checkpoints.
        wanted: `identity` of the run.

    Raises:
        ConfigError: the path has no checkpoint, or the checkpoint is of a run with other settings
            or inputs; the error lists them.
        ArtifactError: loading the checkpoint at the path would run code.
    """
    if how == "never":
        return None
    path = checkpoint.last_good(root) if how == "auto" else _required(Path(how).expanduser())
    if path is None:
        return None
    saved = checkpoint.open_checkpoint(path)
    names = sorted(set(wanted) | set(saved.identity))
    differs = [
        f"{name}: this run has {_shown(wanted.get(name))}, "
        f"the checkpoint {_shown(saved.identity.get(name))}"
        for name in names
        if wanted.get(name) != saved.identity.get(name)
    ]
    if differs:
        raise ConfigError(
            f"{path} is a checkpoint of another run: {len(differs)} settings differ, "
            f"first {differs[0]}",
            details=differs,
            hint=f"{_AGAIN}; or restore these settings",
        )
    if how != "auto":
        require_harmless(path)
        if best := saved.progress.best:
            require_harmless(path.with_name(checkpoint.name_of(best.step)))
    return saved


def newest(path: Path) -> Path | None:
    """Return `path` if it is a checkpoint, else the newest checkpoint in it, or None."""
    return path if (path / checkpoint.STATE).is_file() else checkpoint.last_good(path)


def require_harmless(folder: Path) -> None:
    """Check that a checkpoint runs no code when it is unpickled.

    Raises:
        ArtifactError: a file names a function or class that our checkpoints do not have, or cannot
            be scanned; or an entry is a link.
    """
    scanner = Scanner()
    for path in sorted(folder.rglob("*")):
        problems = ["is a link"] if path.is_symlink() else []
        if path.is_file() and not problems:
            scanned = scanner.scan(path)
            problems = [f"runs {name!a}" for name in sorted(scanned.names - TENSORS)]
            problems += scanned.unreadable
        if problems:
            raise ArtifactError(
                f"train.resume: {path} is not from a checkpoint of this project: {problems[0]}",
                details=problems,
                hint=f"name a checkpoint of a run of your own; {_AGAIN}",
            )


def _require_convertible(saved: Checkpoint, settings: Settings) -> None:
    """Refuse states that DeepSpeed's converter does not bring to another number of ranks."""
    optimizer, best = settings.optim.optimizer, saved.progress.best
    problem = ""
    if optimizer != "adamw":
        problem = f"the states of train.optimizer={optimizer} cannot be converted"
    elif settings.evaluate.keep == "best" and best:
        problem = "the best checkpoint so far, which train.keep=best needs, is not converted"
    if problem:
        raise ConfigError(
            f"{saved.path} was written by {saved.world_size} ranks, this run has "
            f"{settings.world_size}: {problem}",
            hint=f"resume with {saved.world_size} ranks (train.nproc, train.nodes); {_AGAIN}",
        )


def _require_best(saved: Checkpoint, job: TrainJob) -> None:
    """Refuse `train.keep=best` if the best checkpoint so far is not among this run's own."""
    best = saved.progress.best
    if job.settings.evaluate.keep == "best" and best and best.step != saved.progress.step:
        path = job.checkpoints / checkpoint.name_of(best.step)
        if not path.is_dir():
            raise ConfigError(
                f"train.keep=best, and the best checkpoint so far does not exist: {path}",
                hint=f"copy it there; train.keep=last; {_AGAIN}",
            )


def _required(path: Path) -> Path:
    chosen = newest(path)
    if chosen is None:
        problem = "holds no complete checkpoint" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"train.resume={path} {problem}",
            hint="name a folder step-????????, or train.resume=auto or never",
        )
    return chosen.resolve()


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:12]}..."


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
