"""What a node other than the first does with the command of the run: it lends its ranks."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

from flows.config import Composed
from tasks.launch import kill_children_on_abort, launch
from tasks.nodes import Meeting, follow
from tasks.train import rank_environment, torchrun
from tasks.training.job import Launch, TrainJob


def run_follower(composed: Composed, meeting: Meeting) -> int:
    """Lend this node's ranks until node 0 is done. Returns node 0's exit status."""
    logs = composed.runs / "logs" / f"node-{meeting.rank:02d}"
    logs.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    log = logging.getLogger("plumbline.node")
    log.info("node %d of %d follows %s", meeting.rank, meeting.nodes, meeting.address)

    def join(job_path: Path) -> None:
        how: Launch = TrainJob.read(job_path).settings.launch
        launch(
            torchrun(how, job_path, meeting),
            stage="train",
            log=log,
            log_path=logs / "train.log",
            env=rank_environment(how),
            timeout_s=how.timeout_s,
        )

    with kill_children_on_abort():
        status = follow(meeting, composed.runs, join)
    log.info("node 0 is done, status %d", status)
    return status
