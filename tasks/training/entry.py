"""Start and end of a rank, whatever it computes.

A rank exits with status 0 when it is done and with status 3 on an error that it can explain; the
event "failure" then carries the message. Any other error ends with a traceback and status 1.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import time
import traceback
from pathlib import Path
from typing import NoReturn

from tasks.core.events import emit, send_warnings
from tasks.process.block_unused_imports import compiles, start_lean
from tasks.process.exit_process import end_process
from tasks.training.job import TrainJob

DELIBERATE = 3
UNFORESEEN = 1


def enter(job_path: str, module: str) -> NoReturn:
    """Run one rank of a job (`job.json`) and end this process.

    `module` has the function `train_with(ranks, job, started)`. It is imported after `start_lean`
    has blocked unused imports.
    """
    # If a library aborts the process, its lines of Python are the only trace.
    faulthandler.enable(all_threads=False)
    send_warnings()
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
    from tasks.training.engine.failure import collective_timeout_s, explain

    train_with, launch = importlib.import_module(module).train_with, job.settings.launch
    try:
        ranks = Ranks(
            timeout_s=collective_timeout_s(job),
            device=launch.device,
            sequence_parallel=launch.sequence_parallel,
        )
        train_with(ranks, job, started)
        ranks.barrier()
        ranks.leave()
    except Exception as error:
        if (explained := explain(error, job, rank)) is None:
            raise
        about = {"message": explained.message, "details": list(explained.details)}
        emit("failure", error=type(explained).__name__, **about, hint=explained.hint, rank=rank)
        return DELIBERATE
    return 0
