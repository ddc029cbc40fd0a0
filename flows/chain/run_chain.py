"""The body of a training flow: compose, check, run the chain, judge, register.

It runs under the command line and in a Prefect worker alike; both hand it Hydra overrides.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from prefect import get_run_logger, task

from flows.chain.chain import Chain
from flows.chain.context import Delivered
from flows.chain.steps import Link, compose, links
from flows.cli.config import Composed
from flows.cli.lock import hold
from flows.cli.plan import check, render
from flows.orchestration.flow_run import Attempt, in_prefect, tracker_of
from flows.orchestration.summary import stage_entry
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import Mechanism
from tasks.process.launch import kill_children_on_abort
from tasks.process.multinode import Leader, Meeting
from tasks.register import Gate, judge_gate, register


def run_flow(name: str, overrides: list[str]) -> dict[str, Any]:
    """Run one flow to its end.

    Returns:
        the summary.

    Raises:
        PlumblineError: what ended it; the summary says so too, unless nothing was started.
    """
    composed = compose(overrides)
    chain = links(composed, overrides)
    if composed.settings["plan"]:
        text = render(chain)
        get_run_logger().info("%s", text)
        check(chain)
        return {"status": "planned", "plan": text}
    check(chain)
    with hold(composed.runs, composed.settings["paths"]["wait_s"]), kill_children_on_abort():
        exp = experiment_of(overrides)
        attempt = Attempt.begin(
            name, composed, in_prefect(name), tracker=tracker_of(composed), exp=exp
        )
        attempt.summary.defaults = [line for link in chain for line in defaults_of(link)]
        return attempt.run(" ".join(filter(None, (name, exp))), partial(_stages, chain=chain))


def defaults_of(link: Link) -> list[str]:
    """Return the lines about computed defaults of a link that trains a real model."""
    if link.composed.settings["model"]["kind"] == "toy":
        return []  # the embedded model's numbers are nobody's choice
    name = f"{link.name}: " if link.name else ""
    return [f"{name}{line}" for line in link.composed.defaults]


def experiment_of(overrides: list[str]) -> str | None:
    """The experiment that the overrides name, if any."""
    named = [o.partition("=")[2] for o in overrides if o.lstrip("+").startswith("exp=")]
    return named[-1] if named else None


def _stages(attempt: Attempt, *, chain: Sequence[Link]) -> None:
    """All chains, and what their end is told to: summary and registry."""
    mechanism, composed = attempt.mechanism, attempt.composed
    log_path = mechanism.logs / "reference.log"
    scorer = ReferenceScorer(log=attempt.host.log, log_path=log_path, threads=_threads(composed))
    meeting = Meeting.from_environment(composed.settings["train"]["nodes"])
    with Leader(meeting, composed.runs) if meeting else nullcontext() as leader, scorer:
        served = _deliver(chain, mechanism, scorer, leader)
    attempt.summary.served = str(served.path)
    _register(attempt, served)


def _deliver(
    chain: Sequence[Link], mechanism: Mechanism, scorer: ReferenceScorer, leader: Leader | None
) -> Artifact:
    """Every link, each on what the one before it delivers. Returns what the last one serves."""
    earlier: Delivered | None = None
    reward: Artifact | None = None
    for link in chain:
        with mechanism.link(link.name) as of_link:
            settings = link.composed.settings
            run = Chain(settings, of_link, scorer, leader, earlier=earlier, reward=reward)
            delivered = run.deliver()
        if link.objective == "reward":
            reward = delivered.served
        else:
            earlier = delivered
    return delivered.served


def _threads(composed: Composed) -> int:
    """Those of a rank: with another number of threads sums are rounded differently."""
    train = composed.settings["train"]
    return train["threads"] or max(1, len(os.sched_getaffinity(0)) // train["nproc"])


def _register(attempt: Attempt, served: Artifact) -> None:
    """Not a cached stage: the registry may be another one, or may have been emptied."""
    settings, results = attempt.composed.settings, attempt.mechanism.results
    metrics = {k: v for result in results for k, v in result.metrics.items()}
    gate = judge_gate(metrics, min_eval_gain=settings["gate"]["min_eval_gain"])
    verdict: dict[str, Any] = {"passed": gate.passed, "reasons": list(gate.reasons)}
    attempt.summary.gate = verdict
    before = time.monotonic()
    version = task(_write_version, name="register", cache_policy=None)(attempt, served, gate)
    verdict["version"] = version
    attempt.summary.stages = [*map(stage_entry, results), _register_entry(version, before)]


def _write_version(attempt: Attempt, served: Artifact, gate: Gate) -> str:
    results = attempt.mechanism.results
    return register(
        attempt.mechanism.tracker,
        served=served,
        gate=gate,
        model_name=attempt.composed.settings["tracking"]["model_name"],
        tags={
            "exp": attempt.summary.exp or "",
            **{f"digest.{result.artifact.kind}": result.artifact.digest for result in results},
        },
    )


def _register_entry(version: str, before: float) -> dict[str, Any]:
    return {
        "name": "register",
        "seconds": round(time.monotonic() - before, 2),
        "reused": False,
        "artifact": version,
        "tensors_checked": 0,
        "drift": None,
    }
