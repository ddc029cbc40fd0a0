"""Print what a run would do (`plan=true`), and run the checks that every run has to pass."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from flows.chain.chain import Chain
from flows.chain.context import Delivered
from flows.chain.dry_run import DryRun
from flows.chain.steps import Step
from flows.chain.train import resolved
from tasks.config.checks import findings, preflight
from tasks.config.checks.engine import engine_memory
from tasks.config.checks.model import look_at, why_unknown
from tasks.config.checks.phases import RankMemory, in_words, memory_of
from tasks.config.defaults import ONLINE
from tasks.config.online import Rl
from tasks.config.section import read_section
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.finding import Finding
from tasks.core.machine import available_memory, gpu_memory, has_gpu
from tasks.core.terminal import plain
from tasks.data.kinds import kind_for, names_texts
from tasks.data.readers import FILE_KINDS
from tasks.pipeline.artifact import Artifact
from tasks.prepare import control_settings, prepare_data
from tasks.process.launch import launch, python_child
from tasks.rl.algorithms.algorithm_options import described
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import TrainJob
from tasks.training.memory.estimate import LIBRARIES
from tasks.training.memory.sizes import Sizes
from tasks.training.tokens.truncation import too_long, unlearned
from tasks.weights.quantized.quantize import quantized_size

SAMPLE = 1000
"""Number of rows that a plan tokenises to count those that are too long."""
QUIET = logging.getLogger("plumbline.plan")
QUIET.setLevel(logging.CRITICAL)


class Rows(NamedTuple):
    """Count of a step's first rows: lines of the plan, and problems."""

    lines: list[str]
    findings: list[Finding]


def check(
    steps: Sequence[Step], *, counted: Mapping[str, Rows] | None = None, shown: bool = False
) -> None:
    """Check all steps of a run and print the warnings.

    Args:
        steps: the steps of the run.
        counted: result of `count_rows`; None if rows were not counted.
        shown: True if a plan has just printed all findings; they are not printed again.

    Raises:
        ConfigError: the configuration is invalid; the error names the problems of all steps.
    """
    problems: list[ConfigError] = []
    for step in steps:
        settings = step.composed.settings
        rank = memory_of(settings, rewarded=step.rewarded)
        more = counted[step.name].findings if counted else ()
        try:
            reported = findings(
                settings, step.composed.runs, rank, **step.earlier, typed=step.typed
            )
            warnings = preflight([*reported, *more])
        except ConfigError as error:
            problems.append(_with_step(error, step))
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


def _with_step(error: ConfigError, step: Step) -> ConfigError:
    details = [f"{_prefix(step)}{line}" for line in error.details]
    return ConfigError(error.message, details=details)


def _prefix(step: Step) -> str:
    return f"{step.name}: " if step.name else ""


def render(steps: Sequence[Step], counted: Mapping[str, Rows] | None = None) -> str:
    """Return the plan as text: stages, defaults, memory, DeepSpeed's configuration, findings."""
    rows = counted or {step.name: Rows([], []) for step in steps}
    parts = []
    for step in steps:
        text = _of_step(step, rows[step.name], last=step is steps[-1])
        parts.append(f"step {step.name}:\n{text}" if step.name else text)
    return "\n\n".join(parts)


def _of_step(step: Step, rows: Rows, *, last: bool) -> str:
    composed, settings = step.composed, step.composed.settings
    rank = memory_of(settings, rewarded=step.rewarded)
    reported = findings(settings, composed.runs, rank, **step.earlier, typed=step.typed)
    lines = [f"  {finding.severity}: {finding}" for finding in [*reported, *rows.findings]]
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
            *rows.lines,
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


def count_rows(steps: Sequence[Step]) -> dict[str, Rows]:
    """Return the count of each step's first rows, by the name of the step."""
    return {step.name: _rows(step.composed.settings) for step in steps}


def _rows(settings: dict[str, Any]) -> Rows:
    """Tokenise the first rows of local files as training does.

    Nothing is counted if the model's tokenizer or the data are not on this machine.
    """
    model, data = settings["model"], settings["data"]
    base = Path(model["path"] or "").expanduser()
    local = data["kind"] in FILE_KINDS and model["kind"] == "hf" and base.is_dir()
    training = resolved(settings)
    if not local or training.online or not (base / "tokenizer_config.json").is_file():
        return Rows([], [])
    seen: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            account = _first_rows(settings, folder)
            job = TrainJob(training, base.resolve(), "", folder, folder, folder)
            job.write(folder / "job.json")
            launch(
                python_child("tasks.training.tokens.count_truncated", str(folder / "job.json")),
                stage="plan",
                log=QUIET,
                log_path=folder / "log",
                env={"HF_HUB_OFFLINE": "1"},
                on_event=seen.append,
            )
        except PlumblineError as error:
            return Rows([f"rows: not counted: {error.message}"], [])
    read = sum(split["read"] for split in account["splits"].values())
    part = read == SAMPLE != data["max_samples"]
    which = f"of the first {read} rows" if part else f"of {read} rows"
    unused = ", ".join(account["unused_columns"])
    lines = [f"columns that are not used: {unused}"] if unused else []
    counts = next((event for event in seen if event["event"] == "data"), None)
    if counts is None:
        problems = [
            Finding("data", f"{which}, {event['message']}", "training refuses", event["hint"])
            for event in seen
        ]
        return Rows(lines, problems)
    text = "; ".join([too_long(counts, max_len=training.batch.max_len), *unlearned(counts)])
    lines = [f"rows: {which}, {text}", *lines]
    if counts["truncated"] <= data["max_truncated"] * counts["read"]:
        return Rows(lines, [])
    most = f"training refuses more than data.max_truncated={data['max_truncated']:g}"
    override = f"train.max_len={counts['fits_99'] or counts['fits_all']}"
    severity: Literal["error", "warning"] = "warning" if part else "error"
    cut = f"{which}, {counts['truncated']} would be cut"
    return Rows(lines, [Finding("train.max_len", cut, most, override, severity)])


def _first_rows(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Write the first rows to `train.jsonl`, and return the contents of `dataset.json`."""
    data = {k: v for k, v in settings["data"].items() if k != "max_truncated"}
    most = min(SAMPLE, data["max_samples"] or SAMPLE)
    rows = kind_for(settings["train"]["objective"], texts=names_texts(data)).name
    data |= control_settings(settings)
    changes = {"max_samples": most, "eval_path": None, "eval_fraction": 1e-6, "rows": rows}
    report = prepare_data(folder, **{**data, **changes, "on_bad_line": "skip"}, log=QUIET)
    with (folder / "train.jsonl").open("a", encoding="ascii") as train:
        train.write((folder / "heldout.jsonl").read_text(encoding="ascii"))
    return dict(report.notes)


def _memory(settings: dict[str, Any], rank: RankMemory | None) -> list[str]:
    """Return lines about the memory of a training rank and of the serving engine."""
    if rank is None:
        return [f"memory a rank: unknown: {why_unknown(settings['model'])}"]
    lines = rank.lines()
    ranks, gpu = settings["train"]["nproc"], gpu_memory(settings["train"]["device"])
    has = gpu or available_memory() // max(ranks, 1)
    lines.insert(1, f"  {bar(rank.total / has)} of {in_words(has)}, the share of a rank")
    if (sharing := settings["train"]["sequence_parallel"]) > 1:
        lines.append(
            f"  activations: a rank has 1/{sharing} of a row's tokens (train.sequence_parallel)"
        )
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


def bar(share: float) -> str:
    """Return a share as a bar of 20 characters with its percentage; full above 100 %."""
    full = min(max(round(20 * share), 0), 20)
    return f"[{'#' * full}{'-' * (20 - full)}] {share:.0%}"


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
    ranks = f"{replicas} ranks"
    if sharing > 1:
        ranks = f"{replicas} group{'s' * (replicas > 1)} of {sharing} ranks"
    batch = f"{micro} rows x {ranks} x {steps} passes a step"
    shown = "PLUMBLINE_LOG_LEVEL=DEBUG shows its configuration"
    return [f"deepspeed: ZeRO-{training.zero.stage}, {batch} ({shown})"]
