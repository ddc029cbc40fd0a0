"""Print what a run would do (`plan=true`), and run the checks that every run has to pass."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from flows.chain.chain import Chain
from flows.chain.context import Delivered
from flows.chain.dry_run import DryRun
from flows.chain.steps import Step
from flows.chain.train import resolved
from tasks.config.checks import findings, preflight
from tasks.config.checks.memory import RankMemory, engine_memory, in_words, memory_of
from tasks.config.checks.model import look_at, why_unknown
from tasks.config.defaults import ONLINE
from tasks.config.online import Rl
from tasks.config.section import read_section
from tasks.core.errors import ConfigError
from tasks.core.finding import Finding
from tasks.core.machine import available_memory, gpu_memory, has_gpu
from tasks.core.terminal import plain
from tasks.pipeline.artifact import Artifact
from tasks.rl.algorithms import described
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.memory import LIBRARIES, Sizes
from tasks.weights.quantized.quantize import quantized_size


def check(steps: Sequence[Step], *, shown: bool = False) -> None:
    """Check all steps of a run and print the warnings.

    Args:
        shown: True if a plan has just printed all findings; they are not printed again.

    Raises:
        ConfigError: the configuration is invalid; the error names the problems of all steps.
    """
    problems: list[ConfigError] = []
    for step in steps:
        rank = memory_of(step.composed.settings, rewarded=step.rewarded)
        try:
            warnings = preflight(_findings(step, rank))
        except ConfigError as error:
            details = [f"{_prefix(step)}{line}" for line in error.details]
            problems.append(ConfigError(error.message, details=details))
            continue
        for warning in () if shown else warnings:
            print(plain(f"warning: {_prefix(step)}{warning}"), file=sys.stderr)
    if len(problems) > 1:
        details = [line for error in problems for line in error.details]
        what = f"{len(details)} problems in {len(problems)} steps"
        message = f"the preflight found {what}; nothing was started"
        raise ConfigError(message, details=() if shown else details)
    if problems:
        raise ConfigError(problems[0].message) if shown else problems[0]


def _findings(step: Step, rank: RankMemory | None) -> list[Finding]:
    composed = step.composed
    return findings(composed.settings, composed.runs, rank, rewarded=step.rewarded)


def _prefix(step: Step) -> str:
    return f"{step.name}: " if step.name else ""


def render(steps: Sequence[Step]) -> str:
    """Return the plan as text: stages, defaults, memory, DeepSpeed's configuration, findings."""
    parts = []
    for step in steps:
        text = _of_step(step, last=step is steps[-1])
        parts.append(f"step {step.name}:\n{text}" if step.name else text)
    return "\n\n".join(parts)


def _of_step(step: Step, *, last: bool) -> str:
    composed, settings = step.composed, step.composed.settings
    rank = memory_of(settings, rewarded=step.rewarded)
    lines = [f"  {finding.severity}: {finding}" for finding in _findings(step, rank)]
    stages = forecast(step)
    if last:  # only the last model is registered
        push = f"to {settings['push']}, if the gate passes"
        stages += [("register", "to run"), *([("push", push)] if settings["push"] else [])]
    return "\n".join(
        [
            f"runs: {composed.runs}",
            "stages:",
            *(f"  {name:<13} {state}" for name, state in stages),
            "defaults:",
            *(f"  {line}" for line in composed.defaults or ["none"]),
            *_algorithm(settings),
            *_memory(settings, rank),
            *_deepspeed(settings),
            "preflight:",
            *(lines or ["  nothing to report"]),
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


def _memory(settings: dict[str, Any], rank: RankMemory | None) -> list[str]:
    """Return lines about the memory of a training rank and of the serving engine."""
    if rank is None:
        return [f"memory a rank: unknown: {why_unknown(settings['model'])}"]
    ranks, gpu = settings["train"]["nproc"], gpu_memory(settings["train"]["device"])
    has = gpu or available_memory() // max(ranks, 1)
    lines = [f"memory a rank: {rank}; its share is {in_words(has)}"]
    if rank.host:
        lines.append(f"memory a rank on the host: {in_words(rank.host)} of states")
    known, _ = look_at(settings["model"])
    engine = engine_memory(known.config, settings, gpu_bytes=gpu_memory())
    return [
        *lines,
        f"memory of smoke_eval: {engine}",
        f"beside that: libraries, about {in_words(LIBRARIES)} a process at most",
        *_quantized(known.config, settings["convert"]),
    ]


def _quantized(config: dict[str, Any], convert: dict[str, Any]) -> list[str]:
    """Return the line about the quantised version of the model."""
    if convert["quantize"] == "none":
        return []
    sizes = Sizes.of(config)
    before = 2 * sizes.weights()
    after = quantized_size(before, sizes.linear_weights(), convert)
    size = f"about {in_words(after)}, beside {in_words(before)} in 16 bits"
    return [f"quantized: {convert['quantize']}, {size}"]


def _deepspeed(settings: dict[str, Any]) -> list[str]:
    """Return one line about DeepSpeed; its whole configuration for PLUMBLINE_LOG_LEVEL=DEBUG."""
    training = resolved(settings)
    try:
        gpu = has_gpu(training.launch.device)
        config = deepspeed_config(training, training.world_size, gpu=gpu)
    except ConfigError as error:
        return [f"deepspeed: none: {error}"]
    if os.environ.get("PLUMBLINE_LOG_LEVEL") == "DEBUG":
        return ["deepspeed:", *(f"  {line}" for line in json.dumps(config, indent=2).splitlines())]
    micro, steps = (
        config[name] for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    sharing = training.launch.sequence_parallel
    replicas = training.world_size // sharing
    ranks = f"{replicas} groups of {sharing} ranks" if sharing > 1 else f"{replicas} ranks"
    batch = f"{micro} rows x {ranks} x {steps} passes a step"
    shown = "PLUMBLINE_LOG_LEVEL=DEBUG shows its configuration"
    return [f"deepspeed: ZeRO-{training.zero.stage}, {batch} ({shown})"]
