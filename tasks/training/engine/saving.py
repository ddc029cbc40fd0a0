"""Save and restore checkpoints: the engines' states, and partitions of the trained tensors."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError

from tasks.core.disk import flush_tree
from tasks.core.errors import TrainingError
from tasks.training.engine import checkpoint
from tasks.training.engine.checkpoint import ENGINE, SHARDS, Progress
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.engine.failure import another_rank_failed
from tasks.training.engine.partitions import (
    SavedPartitions,
    not_finite,
    own_partitions,
    trainable,
    write_partitions,
)
from tasks.training.job import TrainJob
from tasks.training.outputs import write_partition_index

LOG = logging.getLogger(__name__)
Others = Mapping[str, Callable[[], AbstractContextManager[Any]]]
"""Engines beside the policy's, by the name of their folder in a checkpoint."""


class Saver:
    """Writes the checkpoints of a run. All ranks make the same calls.

    Args:
        engine: the DeepSpeed engine that the run trains.
        job: settings and paths of the run.
        ranks: the process group.
        others: further engines (a critic), by folder name. Each is used within its context, in
            which the parameters that it trains require gradients.
    """

    def __init__(
        self, engine: Any, job: TrainJob, ranks: Ranks, others: Others = MappingProxyType({})
    ) -> None:
        self._engine, self._job, self._ranks, self._others = engine, job, ranks, others

    def save(self, progress: Progress) -> None:
        """Write a checkpoint of the current step, and delete old ones.

        Args:
            progress: progress of the run.

        Raises:
            TrainingError: a weight is not finite (raised on every rank), or a file could not be
                written (raised on that rank; torchrun ends the others). Older checkpoints stay.
        """
        job, ranks, model = self._job, self._ranks, self._engine.module
        partitions = own_partitions(model, rank=ranks.rank, world_size=ranks.world_size)
        _require_finite(not_finite(partitions), job, ranks, progress.step)
        work = checkpoint.work_folder(job.checkpoints, progress.step)
        with _as_training_error(work, ranks):
            if ranks.first:
                checkpoint.sweep(job.checkpoints)
                work.mkdir()
            ranks.barrier()
            self._save_engines(work)
            if ranks.first:
                write_partition_index(job, model, work / checkpoint.PARTITIONS)
            write_partitions(
                partitions, work / SHARDS, rank=ranks.rank, world_size=ranks.world_size
            )
            ranks.barrier()  # a file has another name until it is complete
            flush_tree(work)  # on each rank: one node cannot flush the pages of another
            # Not each rank's own list: on a network disk one may not see yet what another wrote.
            listed = ranks.all_objects(checkpoint.file_names(work))
            names = sorted({name for seen in listed for name in seen})
            share = names[ranks.rank :: ranks.world_size]
            hashed = ranks.all_objects(checkpoint.hash_files(work, share))
            if ranks.first:
                checkpoint.describe(
                    work,
                    world_size=ranks.world_size,
                    identity=dict(job.identity),
                    progress=progress,
                    files={name: entry for part in hashed for name, entry in part.items()},
                )
                checkpoint.publish(work)
        if ranks.first:
            _prune(job, progress)
        ranks.barrier()

    def _save_engines(self, work: Path) -> None:
        """Let DeepSpeed write the states of all engines."""
        how = {
            "save_latest": False,
            "exclude_frozen_parameters": self._job.settings.peft.kind != "none",
        }
        self._engine.save_checkpoint(str(work), tag=ENGINE, **how)
        for name, context in self._others.items():
            with context() as extra:
                extra.save_checkpoint(str(work), tag=name, **how)


@contextmanager
def _as_training_error(work: Path, ranks: Ranks) -> Iterator[None]:
    """Raise a TrainingError if a file cannot be written; pass on the failure of another rank."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save raises RuntimeError
        if another_rank_failed(error):
            raise
        raise _not_written(error, work, ranks) from error


def restore(
    engine: Any, job: TrainJob, ranks: Ranks, others: Others = MappingProxyType({})
) -> Progress:
    """Load the checkpoint `job.resume` into new engines, and return the progress stored in it.

    Without a checkpoint the engines stay as they are and the progress is that of a new run.
    Arguments are those of `Saver`.

    Raises:
        TrainingError: the loaded weights differ from the saved ones.
    """
    if job.resume is None:
        return Progress()
    saved = checkpoint.open_checkpoint(job.resume)
    folder = job.universal or job.resume
    _load(engine, folder, ENGINE)
    load_others(others, folder)
    _require_same_weights(engine, job.resume, ranks)
    return saved.progress


def _load(engine: Any, folder: Path, tag: str) -> None:
    path, _ = engine.load_checkpoint(
        str(folder), tag=tag, load_module_strict=False, load_lr_scheduler_states=False
    )
    if path is None:
        raise TrainingError(f"DeepSpeed could not read the checkpoint {folder / tag}")


def load_weights(engine: Any, path: Path, ranks: Ranks) -> None:
    """Load the trained weights of a checkpoint into the model, but no optimizer state."""
    from deepspeed import zero

    saved = SavedPartitions(path / SHARDS)
    for name, parameter in trainable(engine.module).items():
        with zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if not hasattr(parameter, "ds_id") or ranks.first:
                parameter.copy_(saved.whole(name).view_as(parameter))


def load_others(others: Others, path: Path) -> None:
    """Load a checkpoint's states into the engines beside the main one."""
    for name, context in others.items():
        with context() as extra:
            _load(extra, path, name)


def _require_same_weights(engine: Any, path: Path, ranks: Ranks) -> None:
    saved = SavedPartitions(path / SHARDS)
    partitions = own_partitions(engine.module, rank=ranks.rank, world_size=ranks.world_size)
    differ = [
        name
        for name, part in partitions.items()
        if not torch.equal(saved.part(name, part.start, part.end), part.data)
    ]
    if differ:
        raise TrainingError(
            f"{path}: {len(differ)} of {len(partitions)} tensors came back changed, first "
            f"{differ[0]}",
            details=differ[:20],
            hint="train.resume=never; please report it, with the versions of torch and deepspeed",
        )


def _require_finite(mine: list[str], job: TrainJob, ranks: Ranks, step: int) -> None:
    broken = sorted({name for names in ranks.all_objects(mine) for name in names})
    if broken:
        good = checkpoint.last_good(job.checkpoints)
        raise TrainingError(
            f"after step {step} {len(broken)} trained tensors are not finite, first {broken[0]}; "
            f"last good checkpoint: {good or 'none yet'}",
            details=broken[:20],
            hint=f"train.lr={job.settings.optim.lr / 10:g}",
        )


def _not_written(error: Exception, work: Path, ranks: Ranks) -> TrainingError:
    good = checkpoint.last_good(work.parent)
    size = f", {checkpoint.folder_bytes(good) / 1e9:.2f} GB" if good else ""
    free = shutil.disk_usage(work.parent).free / 1e9
    return TrainingError(
        f"rank {ranks.rank} could not write the checkpoint {work.parent}: {error}",
        details=[f"last good checkpoint: {good or 'none yet'}{size}", f"free there: {free:.2f} GB"],
        hint="free some space, or save less: train.max_ckpt_num=1, train.save_steps=<more>",
    )


def _prune(job: TrainJob, progress: Progress) -> None:
    best = progress.best
    checkpoint.prune(
        job.checkpoints,
        keep=set() if best is None else {best.step},
        most=job.settings.max_ckpt_num,
        most_gb=job.settings.max_ckpt_gb,
    )
