"""What a node other than the first does with the command of the run: it lends its ranks."""

from __future__ import annotations

import logging
import sys
from functools import partial
from pathlib import Path

from flows.cli.config import Composed
from tasks.process.launch import kill_children_on_abort, launch
from tasks.process.multinode import Meeting, follow
from tasks.train import build_ops, rank_environment, torchrun
from tasks.training.job import TrainJob


def run_follower(composed: Composed, meeting: Meeting) -> int:
    """Lend this node's ranks until node 0 is done. Returns node 0's exit status."""
    logs = composed.runs / "logs" / f"node-{meeting.rank:02d}"
    logs.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    log = logging.getLogger("plumbline.node")
    log.info("node %d of %d follows %s", meeting.rank, meeting.nodes, meeting.address)

    run = partial(launch, stage="train", log=log, log_path=logs / "train.log")

    def join(job_path: Path) -> None:
        job = TrainJob.read(job_path)
        build_ops(job.settings, run)
        how = job.settings.launch
        command = torchrun(job, job_path, meeting)
        run(command, env=rank_environment(how), timeout_s=how.timeout_s)

    with kill_children_on_abort():
        status = follow(meeting, composed.runs, join)
    log.info("node 0 is done, status %d", status)
    return status
