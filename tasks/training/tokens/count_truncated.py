"""Count the rows that `train.max_len` would truncate: `python -m ...count_truncated JOB`.

A plan runs this in a process of its own, without ranks or model. It tokenises the training rows of
the job as a run would, and emits the same event "data", or "unusable" with the reason.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tasks.core.errors import PlumblineError
from tasks.core.events import emit
from tasks.process.block_unused_imports import start_lean
from tasks.training.job import TrainJob


class SingleRank:
    """A single rank without a process group, in place of `Ranks`."""

    rank, world_size, first = 0, 1, True

    def all_objects(self, value: Any) -> list[Any]:
        """Return the value of the only rank."""
        return [value]

    def barrier(self) -> None:
        """Do nothing."""


def count(job: TrainJob) -> None:
    """Tokenise the training rows of `job` into its token folder, and emit the event."""
    from tasks.training.engine.deepspeed_engine import Ranks
    from tasks.training.model.build import load_tokenizer
    from tasks.training.objectives import kind_of
    from tasks.training.tokens.data import load_split

    job = replace(job, max_truncated=1.0)
    try:
        load_split(
            job,
            "train",
            roles=kind_of(job.settings.objective).roles,
            tokenizer=load_tokenizer(job),
            ranks=cast(Ranks, SingleRank()),
        )
    except PlumblineError as error:
        emit("unusable", message=error.message, hint=error.hint)


if __name__ == "__main__":
    start_lean()
    count(TrainJob.read(Path(sys.argv[1])))
