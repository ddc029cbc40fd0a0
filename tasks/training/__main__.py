"""One rank: `torchrun ... -m tasks.training job.json`, training on data or online RL.

A rank exits with status 0 when it is done and with status 3 on an error that it can explain; the
event "failure" then carries the message. Any other error ends with a traceback and status 1.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import time
import traceback
from pathlib import Path

from tasks.core.events import emit, send_warnings
from tasks.process.torch_process import compiles, end_process, start_lean
from tasks.training.job import TrainJob

DELIBERATE = 3
UNFORESEEN = 1


def run(job_path: str) -> int:
    """Run one rank of a job (`job.json`) and return its exit status."""
    started = time.time()
    job, rank = TrainJob.read(Path(job_path)), int(os.environ["RANK"])
    start_lean(compiler=job.settings.runs_vllm and compiles())
    from tasks.training.engine.deepspeed_engine import Ranks, require_same_versions
    from tasks.training.engine.failure import collective_timeout_s, explain

    # Imported now, after `start_lean` has blocked unused imports.
    program = importlib.import_module(
        "tasks.rl.run" if job.settings.online else "tasks.training.run"
    )
    launch = job.settings.launch
    try:
        ranks = Ranks(
            timeout_s=collective_timeout_s(job),
            device=launch.device,
            sequence_parallel=launch.sequence_parallel,
        )
        if launch.nodes > 1:
            require_same_versions(ranks)
        program.train_with(ranks, job, started)
        ranks.barrier()
        ranks.leave()
    except Exception as error:
        if (explained := explain(error, job, rank)) is None:
            raise
        about = {"message": explained.message, "details": list(explained.details)}
        emit("failure", error=type(explained).__name__, **about, hint=explained.hint, rank=rank)
        return DELIBERATE
    return 0


if __name__ == "__main__":
    # If a library aborts the process, its lines of Python are the only trace.
    faulthandler.enable(all_threads=False)
    send_warnings()
    try:
        status = run(sys.argv[1])
    except Exception:  # the edge of a process: the parent shows the last lines
        traceback.print_exc()
        status = UNFORESEEN
    end_process(status)
