"""Program for torchrun: several online runs in one process, which imports only once.

torchrun ... -m tests.rl.online_program JOB.json ...

Checkpoints are found as `tasks.train` does, so a second job with the same checkpoint folder
resumes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

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
        train_with(ranks, TrainJob.read(Path(path)), time.time())
        ranks.barrier()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main(sys.argv[1:])
