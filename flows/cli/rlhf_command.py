"""`python flows/rlhf.py ...`: from a command line to an exit status."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from flows.chain.steps import links
from flows.cli.bootstrap import bootstrap
from flows.cli.config import Composed
from flows.cli.entry import run_main
from flows.cli.lock import hold
from flows.cli.outcome import exit_status
from flows.cli.plan import check, render
from flows.cli.signals import exit_on_signals
from flows.orchestration.follower import run_follower
from flows.orchestration.prefect_server import prefect_server
from flows.orchestration.warm_up import warm_up
from tasks.process.launch import kill_children_on_abort
from tasks.process.multinode import Meeting

PROJECT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Entry of `flows/rlhf.py`. Returns the exit status."""
    with exit_on_signals():
        return run_main("rlhf", _job)


def _job(composed: Composed, overrides: list[str]) -> int:
    """One job: everything that can be refused is refused before a server or a child is started."""
    bootstrap(PROJECT, composed.runs)
    chain = links(composed, overrides)
    if composed.settings["plan"]:
        print(render(chain))
    check(chain, shown=composed.settings["plan"])
    if composed.settings["plan"]:
        return 0
    meeting = Meeting.from_environment(composed.settings["train"]["nodes"])
    if meeting and not meeting.leads:
        return run_follower(composed, meeting)
    with (
        hold(composed.runs, composed.settings["paths"]["wait_s"]),
        prefect_server(composed.runs, meanwhile=partial(warm_up, composed, "flows.rlhf")),
        kill_children_on_abort(),
    ):
        from flows.rlhf import rlhf

        tag = composed.settings["tag"] or "manual"
        return exit_status(rlhf(overrides, tag=tag, return_state=True), composed.runs)
