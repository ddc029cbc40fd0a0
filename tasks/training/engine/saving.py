"""Save and restore checkpoints: DeepSpeed's `save_checkpoint` and `load_checkpoint` in our folders.

The module is also a command, `python -m ...engine.saving CHECKPOINT OUT`: it converts a checkpoint
for another number of ranks. DeepSpeed's converter joins the partitions of all ranks into full
tensors (fp32 weights, both moments), in a process of its own so that no rank waits for it.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from tasks.core.errors import TrainingError
from tasks.core.files import flush_tree
from tasks.training.engine import checkpoint
from tasks.training.engine.checkpoint import ENGINE, Progress
from tasks.training.engine.deepspeed_engine import Ranks, not_finite, own_partitions
from tasks.training.engine.failure import ran_out_of_memory
from tasks.training.job import TrainJob

LOG = logging.getLogger(__name__)
Others = Mapping[str, Callable[[], AbstractContextManager[Any]]]
"""Engines beside the policy's, by the name of their folder in a checkpoint, each within a context
in which the parameters that it trains require gradients."""
_NONE: Others = MappingProxyType({})


def save(
    engine: Any,
    job: TrainJob,
    ranks: Ranks,
    progress: Progress,
    others: Others = _NONE,
    *,
    last: bool = False,
) -> None:
    """Write a checkpoint of the current step, and delete old ones. All ranks take part.

    TrainingError on every rank if a weight is not finite, or a file could not be written; after the
    `last` step the latter is a warning, since the result needs less room. Older checkpoints stay.
    """
    own = own_partitions(engine.module, rank=ranks.rank, world_size=ranks.world_size)
    broken = sorted({name for names in ranks.all_objects(not_finite(own)) for name in names})
    if broken:
        raise TrainingError(
            f"after step {progress.step} {len(broken)} trained tensors are not finite, first "
            f"{broken[0]}; {checkpoint.last_good_of(job)}",
            details=broken[:20],
            hint=f"train.lr={job.settings.optim.lr / 10:g}",
        )
    work = checkpoint.work_folder(job.checkpoints, progress.step)
    errors: list[Exception] = []

    def refused() -> list[str]:
        """Return what the disks of all ranks refused so far, the same on every rank."""
        mine = [f"rank {ranks.rank}: {error}" for error in errors]
        return [line for lines in ranks.all_objects(mine) for line in lines]

    with _collected(errors):
        if ranks.first:
            checkpoint.sweep(job.checkpoints)
            work.mkdir()
    if not refused():
        for name, context in _all(engine, others):
            with context as each, _writing(each, errors):
                each.save_checkpoint(
                    str(work), tag=name, save_latest=False,
                    exclude_frozen_parameters=job.settings.peft.kind != "none",
                )  # fmt: skip
        with _collected(errors):
            flush_tree(work)  # on each rank: one node cannot flush the pages of another
    if not refused() and ranks.first:
        about: dict[str, Any] = {"world_size": ranks.world_size, "progress": progress}
        with _collected(errors):
            checkpoint.publish(work, identity=dict(job.identity), **about)
    if lines := refused():
        free = shutil.disk_usage(job.checkpoints).free / 1e9
        problem = TrainingError(
            f"the checkpoint of step {progress.step} could not be written to {job.checkpoints}: "
            f"{lines[0]}",
            details=[*lines[1:20], checkpoint.last_good_of(job), f"free: {free:.2f} GB"],
            hint="free some space, or save less: train.max_ckpt_num=1, train.save_steps=<more>; "
            "train.save_steps=0 writes none",
        )
        if not last:
            raise problem
        if ranks.first:
            LOG.warning("train: %s; going on to write the result", problem.message)
            with suppress(OSError):
                checkpoint.sweep(job.checkpoints)  # the result gets its room
        ranks.barrier()
        return
    if ranks.first:
        keep = {progress.best.step} if progress.best else set()
        checkpoint.prune(job.checkpoints, keep=keep, most=job.settings.max_ckpt_num)
    ranks.barrier()


@contextmanager
def _collected(errors: list[Exception]) -> Iterator[None]:
    """Collect what a disk refuses: a rank that left the others would keep them waiting."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError
        if ran_out_of_memory(error):
            raise
        errors.append(error)


@contextmanager
def _writing(engine: Any, errors: list[Exception]) -> Iterator[None]:
    """Collect what the disk refuses to the two functions of DeepSpeed that write."""
    writer, collected = engine.checkpoint_engine, _collected(errors)
    save, copy = writer.save, engine._copy_recovery_script
    writer.save, engine._copy_recovery_script = collected(save), collected(copy)
    try:
        yield
    finally:
        writer.save, engine._copy_recovery_script = save, copy


def restore(engine: Any, job: TrainJob, others: Others = _NONE) -> Progress:
    """Load the checkpoint `job.resume` into new engines, and return the progress stored in it.

    Without a checkpoint the engines stay as they are and the progress is that of a new run.
    """
    if job.resume is None:
        return Progress()
    load(engine, job.universal or job.resume, others)
    if job.universal:  # later checkpoints of this run have DeepSpeed's usual form
        engine._config.load_universal_checkpoint = False
    return checkpoint.open_checkpoint(job.resume).progress


def load(engine: Any, folder: Path, others: Others = _NONE) -> None:
    """Load a checkpoint's states into all engines."""
    for name, context in _all(engine, others):
        with context as each:
            path, _ = each.load_checkpoint(
                str(folder), tag=name, load_module_strict=False, load_lr_scheduler_states=False
            )
        if path is None:
            raise TrainingError(f"DeepSpeed could not read the checkpoint {folder / name}")


def _all(engine: Any, others: Others) -> Iterator[tuple[str, AbstractContextManager[Any]]]:
    """Yield the policy's engine and the others, with the names of their folders."""
    yield ENGINE, nullcontext(engine)
    for name, context in others.items():
        yield name, context()


def convert(folder: Path, out: Path) -> None:
    """Write each engine of a checkpoint in DeepSpeed's universal form, to a folder of its name."""
    from deepspeed.checkpoint.ds_to_universal import main as to_universal

    for engine in sorted(path for path in folder.iterdir() if path.is_dir()):
        to_universal(
            SimpleNamespace(
                input_folder=str(engine),
                output_folder=str(out / engine.name),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                # Without tensor parallelism a checkpoint does not say how to join its parts.
                inject_missing_state=True,
            )
        )


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
