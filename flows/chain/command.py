"""Run `python flows/rlhf.py ...` and return its exit status.

On a node other than the first the command only lends its ranks to the run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flows.chain.steps import Step, chain_steps
from flows.cli.bootstrap import bootstrap
from flows.cli.composed import Composed
from flows.cli.entry import run_main
from flows.cli.outcome import exit_status
from flows.cli.plan import check, render
from flows.orchestration.flow_body import start
from tasks.core.redaction import redact, redact_url, without_passwords
from tasks.core.terminal import plain, to_stderr
from tasks.pipeline.locks import Patience, hold
from tasks.process.child import PROJECT
from tasks.process.launch import launch
from tasks.process.multinode import Meeting, follow, rendezvous
from tasks.train import rank_environment, reward_environment, torchrun
from tasks.training.job import TrainJob


def main() -> int:
    """Run the command of this process. Returns the exit status."""
    return run_main("rlhf", _job)


def _job(composed: Composed, overrides: list[str]) -> int:
    """Run one configuration. Whatever can be refused is refused before anything is written."""
    bootstrap(PROJECT, composed.runs)
    steps = chain_steps(composed, overrides)
    if composed.settings["plan"]:
        print(plain(render(steps)))
        check(steps, shown=True)
        return 0
    check(steps)
    meeting = Meeting.from_environment(composed.settings["train"]["nodes"])
    if meeting and not meeting.leads:
        return run_follower(composed, meeting, urls_of(steps))
    patience = Patience(composed.settings["paths"]["wait_s"], to_stderr)
    with hold(composed.runs, patience):

        def body() -> dict[str, Any]:
            from flows.chain.run_chain import run_chain

            return run_chain(composed, steps, without_passwords(overrides), checked=True)

        return exit_status(start("flows.rlhf:rlhf", composed, overrides, body), composed)


def urls_of(steps: Sequence[Step]) -> dict[str, str]:
    """Return `reward.url` of all steps, by the text that is recorded of it."""
    urls = [step.composed.settings["reward"]["url"] for step in steps]
    return {redact(redact_url(url)): url for url in urls if url}


def run_follower(composed: Composed, meeting: Meeting, urls: Mapping[str, str]) -> int:
    """Lend the ranks of this node to node 0 until the run is done. Returns node 0's exit status.

    `urls` is that of `urls_of`: the job of node 0 has no secrets.
    """
    logs = composed.runs / "logs" / f"node-{meeting.rank:02d}"
    logs.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    log = logging.getLogger("plumbline.node")
    log.info("node %d of %d follows %s", meeting.rank, meeting.nodes, meeting.address)

    run = partial(launch, stage="train", log=log, log_path=logs / "train.log")

    def join(job_path: Path) -> None:
        job = TrainJob.read(job_path)
        how = job.settings.launch
        with rendezvous(meeting) as (meet, variables):
            url = urls.get(job.settings.reward_url)
            environment = rank_environment(how) | variables | reward_environment(url)
            run(
                torchrun(job, job_path, meet),
                env=environment,
                timeout_s=how.timeout_s,
            )

    status = follow(meeting, composed.runs, join)
    log.info("node 0 is done, status %d", status)
    return status
