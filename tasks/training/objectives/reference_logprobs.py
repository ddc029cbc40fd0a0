"""The reference model's log-probabilities, written down before the first step.

Full fine-tuning has no adapter to switch off, and a second copy of the model would double the
memory. But the reference is the model as it is before the first step: one pass over the data then,
two numbers a pair, and the same again for every epoch and for a run that goes on from a checkpoint.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from tasks.core.errors import TrainingError
from tasks.training.job import Batch, TrainJob
from tasks.training.objectives.forward_passes import Passes
from tasks.training.tokens.examples import Examples

FOLDER = "reference"


def with_reference(
    examples: Examples, split: str, *, passes: Passes, job: TrainJob, begun: int
) -> Examples:
    """The examples with `values["reference"]`: (E, R) sums over supervised tokens, in nats.

    All ranks take part. Measured when nothing was trained yet, else read from where the run that is
    gone on with wrote it.

    Args:
        examples: of one split.
        split: its name.
        passes: with the engine.
        job: what is trained.
        begun: steps that were taken before.

    Raises:
        TrainingError: a run goes on, and its reference is not there or of other data.
    """
    path = job.checkpoints / FOLDER / f"{split}.npy"
    shape = (len(examples), len(examples.roles))
    if begun:
        found = _read(path, job, shape)
    else:
        found = _measure(examples, passes, job.settings.batch).reshape(shape)
        if passes.ranks.first:
            _write(path, found)
        passes.ranks.barrier()
    return replace(examples, values={**examples.values, "reference": found})


def _measure(examples: Examples, passes: Passes, batch: Batch) -> NDArray[np.float32]:
    ranks, roles = passes.ranks, len(examples.roles)
    found = torch.zeros(len(examples), roles, device=ranks.device)
    for row, logprobs, counted in passes.each(examples, batch):
        if counted:
            found[row.examples] = row.sums(logprobs).view(-1, roles)
    array: NDArray[np.float32] = ranks.total(found).cpu().numpy()
    return array


def _read(path: Path, job: TrainJob, shape: tuple[int, int]) -> NDArray[np.float32]:
    places = [path]
    if job.resume is not None:
        places.append(job.resume.parent / FOLDER / path.name)
    there = next((one for one in places if one.is_file()), None)
    if there is None:
        raise TrainingError(
            f"the reference's log-probabilities are not beside the checkpoints: {path}",
            hint="train.resume=never begins anew, from the reference itself",
        )
    found: NDArray[np.float32] = np.load(there)
    if found.shape != shape:
        raise TrainingError(
            f"{there}: {found.shape} numbers, {shape} are wanted: they are of other data",
            hint="train.resume=never begins anew",
        )
    return found


def _write(path: Path, found: NDArray[np.float32]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    with work.open("wb") as file:
        np.save(file, found)
        file.flush()
        os.fsync(file.fileno())
    work.replace(path)
