"""Run by torchrun: train jobs whose second checkpoint meets a fault while it is written.

torchrun ... -m tests.training.engine.async_program POINT RANK JOB.json ...

Points: `write` and `publish` kill the rank (or `all` ranks) before it writes its partitions, or
before the rename; `slow` emits the event "writing" and takes three seconds; `none`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from tasks.core.events import emit
from tasks.process.block_unused_imports import start_lean
from tests.training import run_jobs

SLOW_S = 3.0


def arm(point: str) -> None:
    """Put the fault into the second call of the function that stands for the point."""
    from tasks.training.engine import checkpoint, saving

    owner, name = {"publish": (checkpoint, "publish")}.get(point, (saving, "write_partitions"))
    usual: Callable[..., Any] = getattr(owner, name)
    calls: list[int] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2 and point == "slow":
            emit("writing")
            time.sleep(SLOW_S)
        elif len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return usual(*args, **kwargs)

    setattr(owner, name, call)


if __name__ == "__main__":
    start_lean()
    point_, rank, *paths = sys.argv[1:]
    if point_ != "none" and rank in ("all", os.environ["RANK"]):
        arm(point_)
    run_jobs.main(paths)
