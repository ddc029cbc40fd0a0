"""Program for torchrun: measures the peak memory of a rank in an online run."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tasks.rl.run import train_with
from tasks.training.engine.deepspeed_engine import Ranks
from tasks.training.job import TrainJob
from tests.training.memory.memory_program import Peaks, leave


def main(path: Path) -> None:
    """Train, and write every rank's peak."""
    import transformers.models.qwen2.modeling_qwen2  # noqa: F401

    job, ranks = TrainJob.read(path), Ranks()
    peaks = Peaks(ranks.device)
    peaks.during("run", lambda: train_with(ranks, job, time.time()))
    leave(job, ranks, ranks.all_objects(peaks.found["run"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
