"""Program for torchrun: an online run in which one rank is killed at a given point.

torchrun ... -m tests.training.killed_program JOB.json POINT RANK

The run resumes from the job's last good checkpoint. `POINT` is a phase of an iteration: the rank is
killed when this phase begins for the second time in this process. `save` kills it in the second
checkpoint before its rename, `evaluate` in the first evaluation; any other word lets it finish.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.process.block_unused_imports import start_lean

PHASES = ("measure", "generate", "score", "estimate", "update", "sync_weights")
POINTS = (*PHASES, "save", "evaluate")


def main(path: str, point: str, rank: str) -> None:
    """Train until the rank is killed."""
    start_lean()
    from tasks.rl.run import train_with
    from tasks.training.engine import checkpoint
    from tasks.training.engine.deepspeed_engine import Ranks
    from tasks.training.job import TrainJob

    job = TrainJob.read(Path(path))
    job = replace(job, resume=checkpoint.last_good(job.checkpoints))
    if point in POINTS and os.environ["RANK"] == rank:
        arm(point)
    train_with(Ranks(), job, time.time())


def arm(point: str) -> None:
    """Kill this process in the call that stands for the point."""
    from tasks.rl.clock import Clock
    from tasks.rl.loop import OnlineTrainer
    from tasks.training.engine import checkpoint

    owners: dict[str, tuple[Any, str, int]] = {
        "save": (checkpoint, "publish", 2),
        "evaluate": (OnlineTrainer, "evaluate", 1),
    }
    owner, name, last = owners.get(point, (Clock, "phase", 2))
    setattr(owner, name, _ending(getattr(owner, name), last, phase=point))


def _ending(right: Callable[..., Any], last: int, *, phase: str) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += phase not in PHASES or args[1] == phase
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return right(*args, **kwargs)

    return call


if __name__ == "__main__":
    main(*sys.argv[1:])
