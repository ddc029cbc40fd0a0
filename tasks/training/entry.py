"""How a rank begins and ends, whatever it computes.

Exit status 3 means that we stopped on purpose; the event "failure" says why. Anything else ends
with a traceback.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import time
import traceback
from pathlib import Path
from typing import NoReturn

from tasks.core.errors import PlumblineError
from tasks.core.events import emit
from tasks.process.block_unused_imports import compiles, start_lean
from tasks.process.exit_process import end_process
from tasks.training.job import TrainJob

DELIBERATE = 3
UNFORESEEN = 1


def enter(job_path: str, module: str) -> NoReturn:
    """Run one rank of the job, and end this process.

    Args:
        job_path: of the `TrainJob`.
        module: whose `train_with(ranks, job, started)` does it; imported once the process is lean.
    """
    # Should a library abort, the lines of Python that led there are the only trace.
    faulthandler.enable(all_threads=False)
    try:
        status = _run(job_path, module)
    except Exception:  # the edge of a process: the parent shows the last lines
        traceback.print_exc()
        status = UNFORESEEN
    end_process(status)


def _run(job_path: str, module: str) -> int:
    started = time.time()
    job, rank = TrainJob.read(Path(job_path)), int(os.environ["RANK"])
    start_lean(compiler=job.settings.runs_vllm and compiles())
    from tasks.training.engine.deepspeed_engine import Ranks
    from tasks.training.engine.failure import in_words

    train_with = importlib.import_module(module).train_with
    try:
        how = job.settings.launch
        ranks = Ranks(timeout_s=how.collective_timeout_s, device=how.device)
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
