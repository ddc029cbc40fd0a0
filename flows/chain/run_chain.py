"""Run `python flows/rlhf.py ...`: compose, check, run the steps, apply the gate, register.

The command calls `run_chain` within a flow, a Prefect worker `run_chain(*prepare(overrides))`. On a
node other than the first the command only lends its ranks to the run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

from flows.chain.chain import Chain, Delivered, resolved
from flows.chain.plan import check, render
from flows.chain.register import register_served
from flows.chain.steps import Step, chain_steps, compose
from flows.cli.bootstrap import bootstrap
from flows.cli.composed import Composed
from flows.cli.config import run_main
from flows.cli.vocabulary import in_step
from flows.orchestration.flow_body import exit_status, start
from flows.orchestration.flow_run import FlowRun, reserve, tracker_of
from tasks.config.checks.memory import memory_of
from tasks.core.errors import DataError
from tasks.core.redaction import redact, redact_url, redacted
from tasks.core.terminal import plain, to_stderr
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.locks import Patience, hold
from tasks.pipeline.stage import Mechanism
from tasks.process.launch import launch
from tasks.process.multinode import Leader, Meeting, follow, rendezvous
from tasks.serving.vllm.job import VllmChild
from tasks.tracking.tracker import Tracker
from tasks.train import check_rows, rank_environment, torchrun
from tasks.training.job import TrainJob
from tasks.weights.files.folder import CHAT_TEMPLATE


def main() -> int:
    """Run the command of this process. Returns the exit status."""
    return run_main("rlhf", _job)


def _job(composed: Composed, overrides: list[str]) -> int:
    """Run one configuration. Whatever can be refused is refused before anything is written."""
    bootstrap(composed.runs)
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
        typed = redacted(overrides)
        body = partial(run_chain, composed, steps, typed, checked=True)
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
            environment = rank_environment(how, urls.get(job.settings.reward_url)) | variables
            run(torchrun(job, job_path, meet), env=environment, timeout_s=how.timeout_s)

    status = follow(meeting, composed.runs, join)
    log.info("node 0 is done, status %d", status)
    return status


def prepare(overrides: list[str]) -> tuple[Composed, list[Step], list[str]]:
    """Compose the configuration of a run and of its steps. Raises ConfigError.

    Returns the arguments of `run_chain`; the last is what was typed, without passwords.
    """
    composed = compose(overrides)
    return composed, chain_steps(composed, overrides), redacted(overrides)


def run_chain(
    composed: Composed, steps: list[Step], overrides: list[str], *, checked: bool = False
) -> dict[str, Any]:
    """Run all steps to the end, and return the summary; with `plan=true` only log the plan.

    Raises PlumblineError, which the summary has, too, unless nothing was started.
    """
    from prefect import get_run_logger  # not imported for a plan on a terminal

    from flows.orchestration.prefect_tasks import in_prefect

    if composed.settings["plan"]:
        text = render(steps)
        get_run_logger().info("%s", text)
        check(steps)
        return {"status": "planned", "plan": text}
    if not checked:
        check(steps)
    with in_prefect("rlhf", composed) as host:
        chosen = [o.partition("=")[2] for o in overrides if o.lstrip("+").startswith("exp=")]
        exp = chosen[-1] if chosen else None
        tracker = tracker_of(composed)
        flow_run = FlowRun.begin(
            "rlhf", composed, host, tracker=tracker, exp=exp, overrides=overrides
        )
        flow_run.summary.defaults = [line for step in steps for line in defaults_of(step)]
        flow_run.summary.memory = {
            f"{step.name}.train".lstrip("."): {"planned": rank.total}
            for step in steps
            if (rank := memory_of(step.composed.settings, rewarded=step.rewarded)) is not None
        }
        title = _describe(flow_run, steps, exp or "rlhf")
        return flow_run.run(title, partial(_run_stages, steps=steps, tracker=tracker))


def _describe(flow_run: FlowRun, steps: Sequence[Step], name: str) -> str:
    """Set the tags of a run; return its name: experiment, objectives, model."""
    model = steps[0].composed.settings["model"]
    objective = "+".join(step.objective for step in steps)
    base = Path(model["path"]).name if model["path"] else model["kind"]
    flow_run.tags |= {"objective": objective, "model": base}
    return f"{name} {objective} {base}"


def defaults_of(step: Step) -> list[str]:
    """Return the lines about computed defaults of a step that trains a real model."""
    if step.composed.settings["model"]["kind"] == "toy":
        return []  # the numbers of the embedded model are fixed
    name = f"{step.name}: " if step.name else ""
    return [f"{name}{line}" for line in step.composed.defaults]


def _run_stages(flow_run: FlowRun, *, steps: Sequence[Step], tracker: Tracker) -> None:
    """Run all steps, then register the model that the last one serves."""
    mechanism, composed = flow_run.mechanism, flow_run.composed
    scorer = flow_run.scorer(_threads(composed))
    meeting = Meeting.from_environment(composed.settings["train"]["nodes"])
    with ExitStack() as stack:
        leader = stack.enter_context(Leader(meeting, composed.runs)) if meeting else None
        children = stack.enter_context(scorer), stack.enter_context(VllmChild())
        delivered = _deliver(steps, mechanism, *children, leader)
    served = delivered.quantized or delivered.served
    flow_run.summary.served = str(served.path)
    if delivered.quantized:
        flow_run.tags["quantize"] = steps[-1].composed.settings["convert"]["quantize"]
        flow_run.tags["digest.unquantized"] = delivered.served.digest
        flow_run.summary.unquantized = str(delivered.served.path)
    register_served(flow_run, served, tracker, steps[-1].composed.settings)


def _deliver(
    steps: Sequence[Step],
    mechanism: Mechanism,
    scorer: ReferenceScorer,
    vllm: VllmChild,
    leader: Leader | None,
) -> Delivered:
    """Run each step on the result of the one before it. Returns the result of the last one."""
    rows: list[Artifact] = []
    for step in steps:  # first, so that a bad row of the last step costs no training
        with mechanism.step(step.name) as step_mechanism:
            rows.append(Chain(step.composed.settings, step_mechanism, scorer).prepare_data())
    with mechanism.step(steps[0].name) as step_mechanism:
        base = Chain(steps[0].composed.settings, step_mechanism, scorer).prepare_base()
    checked = cache(partial(_check_rows, steps, rows, base, scorer))
    earlier: Delivered | None = None
    reward: Artifact | None = None
    for step, data in zip(steps, rows, strict=True):
        with mechanism.step(step.name) as step_mechanism:
            # A step may have other ranks and engines than the run.
            step_mechanism.devices = partial(reserve, step.composed, patience=mechanism.patience)
            settings = step.composed.settings
            run = Chain(
                settings, step_mechanism, scorer, vllm, leader, earlier=earlier, reward=reward
            )
            first = checked if step is not steps[-1] else None  # the last checks its own rows
            delivered = run.deliver(data, base if step is steps[0] else None, first)
        if step.objective == "reward":
            reward = delivered.served
        else:
            earlier = delivered
    return delivered


def _check_rows(
    steps: Sequence[Step], rows: Sequence[Artifact], base: Artifact, scorer: ReferenceScorer
) -> None:
    """Raise DataError for rows that a later step cannot use, before an earlier one trains."""
    template: Path | None = None  # of the model that a step starts from, if not the base's
    models = [step.composed.settings["model"] for step in steps if step.objective != "reward"]
    for step, data in zip(steps, rows, strict=True):
        section, own = step.composed.settings, data.path / CHAT_TEMPLATE
        used = own if own.is_file() else template
        start = section["model"] if step.begins_with is None else models[0]
        if step is not steps[0] and start == steps[0].composed.settings["model"]:  # one tokenizer
            limit = section["data"]["max_truncated"]
            try:
                scorer.perform(check_rows, resolved(section), base.path, data.path, used, limit)
            except DataError as error:
                error.stage = f"{step.name}.train"
                error.hint = in_step(step.name, error.hint)
                raise
        if step.objective != "reward":
            template = used


def _threads(composed: Composed) -> int:
    """Return the threads of a rank: another number of threads would round sums differently."""
    train = composed.settings["train"]
    return train["threads"] or max(1, len(os.sched_getaffinity(0)) // train["nproc"])
