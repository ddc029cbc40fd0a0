"""How a rank begins and ends, whatever it computes.

Exit status 3 means that we stopped on purpose; the event "failure" says why. Anything else ends
with a traceback.
"""

from __future__ import annotations

import importlib
import os
import time
from pathlib import Path

from tasks.errors import PlumblineError
from tasks.events import emit
from tasks.lean import start_lean

DELIBERATE = 3


def enter(job_path: str, module: str) -> int:
    """Run one rank of the job; the exit status.

    Args:
        job_path: of the `TrainJob`.
        module: whose `train_with(ranks, job, started)` does it; imported once the process is lean.
    """
    started = time.time()
    start_lean()
    from tasks.training.engine import Ranks
    from tasks.training.failure import in_words
    from tasks.training.job import TrainJob

    train_with = importlib.import_module(module).train_with
    job, rank = TrainJob.read(Path(job_path)), int(os.environ["RANK"])
    try:
        ranks = Ranks(timeout_s=job.settings.launch.collective_timeout_s)
        train_with(ranks, job, started)
        ranks.barrier()
        ranks.leave()
    except Exception as error:
        said = in_words(error, job, rank)
        if said is None:
            raise
        _say(said, rank)
        return DELIBERATE
    return 0


def _say(error: PlumblineError, rank: int) -> None:
    emit(
        "failure",
        error=type(error).__name__,
        message=error.message,
        details=list(error.details),
        hint=error.hint,
        rank=rank,
    )
