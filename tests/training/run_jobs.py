"""Run by torchrun: train several jobs in turn, with one import of the libraries.

torchrun ... -m tests.training.run_jobs JOB.json ...
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tasks.process.block_unused_imports import start_lean
from tasks.training.job import TrainJob


def main(paths: list[str]) -> None:
    """Train all jobs in this process group; the first says how many ranks share a row."""
    start_lean()
    from tasks.process.exit_process import end_process
    from tasks.training.engine.deepspeed_engine import Ranks
    from tasks.training.run import train_with

    jobs = [TrainJob.read(Path(path)) for path in paths]
    ranks = Ranks(sequence_parallel=jobs[0].settings.launch.sequence_parallel)
    for job in jobs:
        train_with(ranks, job, time.time())
        ranks.barrier()
    ranks.leave()
    end_process()


if __name__ == "__main__":
    main(sys.argv[1:])
