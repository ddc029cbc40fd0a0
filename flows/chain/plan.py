"""Print what a run would do (`plan=true`), and run the checks that every run has to pass."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flows.chain.chain import Chain, Delivered, resolved
from flows.chain.handoff import DryRun
from flows.chain.steps import Step
from tasks.config.checks.memory import LIBRARIES, engine_memory, memory_of
from tasks.config.checks.model import look_at, why_unknown
from tasks.config.defaults import ONLINE
from tasks.config.sections import Rl, read_section
from tasks.core.errors import ConfigError, preflight
from tasks.core.machine import available_memory, gpu_memory
from tasks.core.terminal import in_words, plain
from tasks.pipeline.artifact import Artifact
from tasks.rl.algorithms import described


def check(steps: Sequence[Step], *, shown: bool = False) -> None:
    """Check all steps of a run and print the warnings, unless a plan has just `shown` all findings.

    Raises ConfigError with the problems of all steps.
    """
    prefixes = {step.name: f"{step.name}: " if step.name else "" for step in steps}
    problems = [
        replace(finding, what=f"{prefixes[step.name]}{finding.what}")
        for step in steps
        for finding in step.findings
    ]
    try:
        warnings = preflight(problems)
    except ConfigError as error:
        raise ConfigError(error.message, details=() if shown else error.details) from None
    for warning in () if shown else warnings:
        print(plain(f"warning: {warning}"), file=sys.stderr)


_NOTHING = "  nothing to report; tokens of rows are counted before the first training"


def render(steps: Sequence[Step]) -> str:
    """Return the plan as text: stages, defaults, memory, samples of a step, findings."""
    parts = []
    for step in steps:
        text = _of_step(step, last=step is steps[-1])
        parts.append(f"step {step.name}:\n{text}" if step.name else text)
    return "\n\n".join(parts)


def _of_step(step: Step, *, last: bool) -> str:
    composed, settings = step.composed, step.composed.settings
    lines = [f"  {finding.severity}: {finding}" for finding in step.findings]
    stages = forecast(step)
    if last:  # only the last model is registered
        stages.append(("register", "to run"))
    return "\n".join(
        [
            f"runs: {composed.runs}",
            "stages:",
            *(f"  {name:<13} {state}" for name, state in stages),
            "defaults:",
            *(f"  {line}" for line in composed.defaults or ["none"]),
            *_algorithm(settings),
            *_memory(step),
            _batch(settings),
            "preflight:",
            *(lines or [_NOTHING]),
        ]
    )


def forecast(step: Step) -> list[tuple[str, str]]:
    """Return (stage, state) for every stage that makes the model of a step, in order.

    The state is "to run", "to run (forced): key" or "up to date: key", as a `DryRun` reports it.
    """
    settings, store = step.composed.settings, step.composed.runs / "artifacts"
    dry_run = DryRun(store, frozenset(settings["force"]), step.name)
    unknown = Artifact("served", store / "served", "")
    before = step.begins_with
    chain = Chain(
        settings,
        dry_run,
        dry_run.scorer,
        earlier=Delivered(unknown, unknown, unknown, before) if before else None,
        reward=unknown if step.rewarded else None,
    )
    chain.deliver(chain.prepare_data())
    return dry_run.states


def _algorithm(settings: dict[str, Any]) -> list[str]:
    """Return the effective loss of an online objective; no line for other objectives."""
    name = settings["train"]["objective"]
    if name not in ONLINE:
        return []
    lines = described(name, read_section(Rl, settings["rl"], "rl"))
    return [f"algorithm: {name}", *(f"  {line}" for line in lines)]


def _memory(step: Step) -> list[str]:
    """Return lines about the memory of a training rank and of the serving engine."""
    settings = step.composed.settings
    rank = memory_of(settings, rewarded=step.rewarded)
    if rank is None:
        return [f"memory a rank: unknown: {why_unknown(settings['model'])}"]
    ranks, gpu = settings["train"]["nproc"], gpu_memory(settings["train"]["device"])
    has = gpu or available_memory() // ranks
    host = f", and {in_words(rank.host)} of states on the host" if rank.host else ""
    known, _ = look_at(settings["model"])
    engine = engine_memory(known.config, settings, gpu_bytes=gpu_memory())
    return [
        f"memory a rank: {rank}{host}; its share is {in_words(has)}",
        f"memory of smoke_eval: {engine}",
        f"beside that: libraries, about {in_words(LIBRARIES)} a process at most",
    ]


def _batch(settings: dict[str, Any]) -> str:
    """Return the line about the samples of an optimizer step."""
    training = resolved(settings)
    sharing, batch = training.launch.sequence_parallel, training.batch
    replicas = max(1, training.world_size // sharing)
    ranks = f"{replicas} groups of {sharing} ranks" if sharing > 1 else f"{replicas} ranks"
    passes = max(1, batch.global_batch_size // (batch.micro_batch_size * replicas))
    rows = f"{batch.micro_batch_size} rows x {ranks} x {passes} passes a step"
    return f"deepspeed: ZeRO-{training.zero.stage}, {rows}"
