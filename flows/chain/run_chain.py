"""Run a training flow: compose, check, run the steps of the chain, apply the gate, register.

The command and a Prefect worker call `run_chain(*prepare(overrides))`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

from prefect import get_run_logger

from flows.chain.chain import Chain, Delivered
from flows.chain.register import register_served
from flows.chain.steps import Step, chain_steps, compose
from flows.chain.train import resolved
from flows.cli.composed import Composed
from flows.cli.plan import check, render
from flows.cli.vocabulary import in_step
from flows.orchestration.flow_run import FlowRun, reserve, tracker_of
from flows.orchestration.prefect_tasks import in_prefect
from tasks.config.checks.memory import memory_of
from tasks.core.errors import DataError
from tasks.core.redaction import without_passwords
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import Mechanism
from tasks.process.multinode import Leader, Meeting
from tasks.register import Registry
from tasks.serving.vllm.job import VllmChild
from tasks.train import check_rows
from tasks.weights.files.folder import CHAT_TEMPLATE


def prepare(overrides: list[str]) -> tuple[Composed, list[Step], list[str]]:
    """Compose the configuration of a run and of its steps. Raises ConfigError.

    Returns the arguments of `run_chain`; the last is what was typed, without passwords.
    """
    composed = compose(overrides)
    return composed, chain_steps(composed, overrides), without_passwords(overrides)


def run_chain(
    composed: Composed, steps: list[Step], overrides: list[str], *, checked: bool = False
) -> dict[str, Any]:
    """Run all steps to the end, and return the summary; with `plan=true` only log the plan.

    Raises PlumblineError, which the summary has, too, unless nothing was started.
    """
    if composed.settings["plan"]:
        text = render(steps)
        get_run_logger().info("%s", text)
        check(steps)
        return {"status": "planned", "plan": text}
    if not checked:
        check(steps)
    with in_prefect("rlhf", composed) as host:
        exp = experiment_of(overrides)
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
        return flow_run.run(title, partial(_run_stages, steps=steps, registry=tracker))


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


def experiment_of(overrides: list[str]) -> str | None:
    """Return the experiment that the overrides choose; None if they choose none."""
    experiments = [o.partition("=")[2] for o in overrides if o.lstrip("+").startswith("exp=")]
    return experiments[-1] if experiments else None


def _run_stages(flow_run: FlowRun, *, steps: Sequence[Step], registry: Registry) -> None:
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
    register_served(flow_run, served, registry, steps[-1].composed.settings)


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
