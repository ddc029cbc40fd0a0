"""Run by torchrun: online runs one after another, so that imports are paid for once.

torchrun ... -m tests.rl.online_program JOB.json ...

A job's checkpoints are looked at as `tasks.train` does, so that the second job with the same
folder of checkpoints goes on from them.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tasks.process.block_unused_imports import start_lean


def main(paths: list[str]) -> None:
    """Train all of them in this process group."""
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
