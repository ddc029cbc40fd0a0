"""Program for torchrun: several online runs in one process, which imports only once.

torchrun ... -m tests.rl.online_program JOB.json ...

The event "run" tells which job the next steps belong to.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tasks.core.events import emit
from tasks.process.block_unused_imports import start_lean


def main(paths: list[str]) -> None:
    """Train all jobs in this process group."""
    start_lean()
    from tasks.process.exit_process import end_process
    from tasks.rl.run import train_with
    from tasks.training.engine.deepspeed_engine import Ranks
    from tasks.training.job import TrainJob

    ranks = Ranks()
    for path in paths:
        job = TrainJob.read(Path(path))
        if ranks.first:
            emit("run", name=job.out.name)
        train_with(ranks, job, time.time())
        ranks.barrier()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main(sys.argv[1:])
