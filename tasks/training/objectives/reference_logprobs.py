"""Log-probabilities of the reference model, computed and stored before the first step.

Full fine-tuning has no adapter to switch off, and a second copy of the model would double the
memory; under ZeRO-3 passes with and without an adapter would undo each other's prefetching. The
reference is the model before the first step, so one pass over the data gives its sums
of log-probabilities (one per sequence) for all epochs and for resumed runs.
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
    """Return the examples with `values["reference"]`: (E, R) sums over supervised tokens, in nats.

    A new run computes and stores them; a resumed run reads the stored ones. All ranks take part.

    Args:
        examples: examples of one split.
        split: name of the split.
        passes: forward passes of the model.
        job: settings and paths of the run.
        begun: steps taken before; 0 for a new run.

    Raises:
        TrainingError: the stored values of a resumed run are missing, or of other data.
    """
    path = job.checkpoints / FOLDER / f"{split}.npy"
    shape = (len(examples), len(examples.roles))
    if begun:
        sums = _read(path, job, shape)
    else:
        sums = _measure(examples, passes, job.settings.batch).reshape(shape)
        if passes.ranks.first:
            _write(path, sums)
        passes.ranks.barrier()
    return replace(examples, values={**examples.values, "reference": sums})


def _measure(examples: Examples, passes: Passes, batch: Batch) -> NDArray[np.float32]:
    ranks, roles = passes.ranks, len(examples.roles)
    sums = torch.zeros(len(examples), roles, device=ranks.device)
    for row, logprobs, counted in passes.each(examples, batch):
        if counted:
            sums[row.examples] = row.sums(logprobs).view(-1, roles)
    array: NDArray[np.float32] = ranks.total(sums).cpu().numpy()
    return array


def _read(path: Path, job: TrainJob, shape: tuple[int, int]) -> NDArray[np.float32]:
    places = [path]
    if job.resume is not None:
        places.append(job.resume.parent / FOLDER / path.name)
    stored = next((place for place in places if place.is_file()), None)
    if stored is None:
        raise TrainingError(
            f"the reference's log-probabilities are not beside the checkpoints: {path}",
            hint="train.resume=never starts from the beginning and computes them",
        )
    sums: NDArray[np.float32] = np.load(stored)
    if sums.shape != shape:
        raise TrainingError(
            f"{stored}: log-probabilities of other data: shape {sums.shape}, expected {shape}",
            hint="train.resume=never starts from the beginning and computes them",
        )
    return sums


def _write(path: Path, sums: NDArray[np.float32]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    work = path.with_name(f".{path.name}.{os.getpid()}")
    with work.open("wb") as file:
        np.save(file, sums)
        file.flush()
        os.fsync(file.fileno())
    work.replace(path)
