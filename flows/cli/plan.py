"""`plan=true`: what a run would do. Starts nothing. And `check`, which every run passes first."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from flows.chain.chain import Chain
from flows.chain.context import Delivered
from flows.chain.steps import Link
from flows.chain.train import resolved
from flows.cli.dry_run import Looker
from tasks.config.checks import findings, preflight
from tasks.config.checks.engine import engine_memory
from tasks.config.checks.model import look_at, why_unknown
from tasks.config.checks.phases import RankMemory, in_words, memory_of
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.machine import gpu_memory, has_gpu
from tasks.data.kinds import kind_for, names_texts
from tasks.data.readers import FILE_KINDS
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import Mechanism
from tasks.prepare import prepare_data
from tasks.process.launch import launch, python_child
from tasks.training.engine.zero_config import deepspeed_config
from tasks.training.job import TrainJob
from tasks.training.memory.estimate import LIBRARIES
from tasks.training.tokens.truncation import too_long

SAMPLE = 1000
"""Rows that a plan tokenises to see how long they are."""
QUIET = logging.getLogger("plumbline.plan")
QUIET.setLevel(logging.CRITICAL)


def check(links: Sequence[Link], *, shown: bool = False) -> None:
    """Print the preflight's warnings.

    Args:
        links: the steps of the run.
        shown: True where a plan has just shown all findings; they are not printed again.

    Raises:
        ConfigError: with everything that rules the run out, of all links together.
    """
    problems: list[ConfigError] = []
    for link in links:
        settings = link.composed.settings
        rank = memory_of(settings, rewarded=link.rewarded)
        try:
            warnings = preflight(
                settings, link.composed.runs, rank, **link.earlier, typed=link.typed
            )
        except ConfigError as error:
            problems.append(_named(error, link))
            continue
        for warning in () if shown else warnings:
            print(f"warning: {_prefix(link)}{warning}", file=sys.stderr)
    if len(problems) > 1:
        details = [line for error in problems for line in error.details]
        what = f"{len(details)} problems in {len(problems)} steps"
        message = f"the preflight found {what}; nothing was started"
        raise ConfigError(message, details=() if shown else details)
    if problems:
        raise ConfigError(problems[0].message) if shown else problems[0]


def _named(error: ConfigError, link: Link) -> ConfigError:
    details = [f"{_prefix(link)}{line}" for line in error.details]
    return ConfigError(error.message, details=details)


def _prefix(link: Link) -> str:
    return f"{link.name}: " if link.name else ""


def render(links: Sequence[Link]) -> str:
    """The plan as text: stages, DeepSpeed's configuration, memory, findings. Writes nothing."""
    parts = [
        f"link {link.name}:\n{_of_link(link)}" if link.name else _of_link(link) for link in links
    ]
    return "\n\n".join(parts)


def _of_link(link: Link) -> str:
    composed, settings = link.composed, link.composed.settings
    rank = memory_of(settings, rewarded=link.rewarded)
    reported = findings(settings, composed.runs, rank, **link.earlier, typed=link.typed)
    lines = [f"  {finding.severity}: {finding}" for finding in reported]
    return "\n".join(
        [
            f"runs: {composed.runs}",
            "stages:",
            *(f"  {name:<13} {state}" for name, state in forecast(link)),
            "defaults:",
            *(f"  {line}" for line in composed.defaults or ["none"]),
            *_rows(settings),
            *_memory(settings, rank),
            "deepspeed:",
            *_deepspeed(settings),
            "preflight:",
            *(lines or ["  nothing to report"]),
        ]
    )


def forecast(link: Link) -> list[tuple[str, str]]:
    """(stage, "to run", "forced" or "up to date: key") for every stage of the chain, in order.

    Found by sending the chain through a mechanism that only looks: `flows/cli/dry_run.py`.
    """
    settings, store = link.composed.settings, link.composed.runs / "artifacts"
    looker = Looker(store, frozenset(settings["force"]), link.name)
    to_come = Artifact("served", store / "served", "")
    before = link.begins_with
    Chain(
        settings,
        cast(Mechanism, looker),
        looker.scorer,
        earlier=Delivered(to_come, to_come, to_come, before) if before else None,
        reward=to_come if link.rewarded else None,
    ).deliver()
    return [*looker.seen, ("register", "to run")]


def _rows(settings: dict[str, Any]) -> list[str]:
    """Count rows longer than `train.max_len` among the first ones of local files.

    Nothing where the model's tokenizer or the data are not at hand.
    """
    model, data = settings["model"], settings["data"]
    base = Path(model["path"] or "").expanduser()
    local = data["kind"] in FILE_KINDS and model["kind"] == "hf" and base.is_dir()
    asked = resolved(settings)
    if not local or asked.online or not (base / "tokenizer_config.json").is_file():
        return []
    seen: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            _first_rows(settings, folder)
            job = TrainJob(asked, base.resolve(), "", folder, folder, folder)
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
            return [f"rows: not counted: {error.message}"]
    counts = next((event for event in seen if event["event"] == "data"), None)
    if counts is None:
        return [f"rows: {event['message']} -> {event['hint']}" for event in seen]
    text = too_long(counts, max_len=asked.batch.max_len)
    if counts["truncated"] > data["max_truncated"] * counts["read"]:
        text += f"; more than data.max_truncated={data['max_truncated']:g}, training will refuse"
    return [f"rows: of the first {counts['read']}, {text}"]


def _first_rows(settings: dict[str, Any], folder: Path) -> None:
    data = {k: v for k, v in settings["data"].items() if k != "max_truncated"}
    most = min(SAMPLE, data["max_samples"] or SAMPLE)
    rows = kind_for(settings["train"]["objective"], texts=names_texts(data)).name
    changes = {"max_samples": most, "eval_path": None, "eval_fraction": 1e-6, "rows": rows}
    prepare_data(folder, **{**data, **changes, "on_bad_line": "skip"}, log=QUIET)


def _memory(settings: dict[str, Any], rank: RankMemory | None) -> list[str]:
    """Of a training rank, and of the engine that serves; both beyond what libraries take."""
    if rank is None:
        return [f"memory a rank: unknown: {why_unknown(settings['model']['path'])}"]
    lines = rank.lines()
    if rank.host:
        lines.append(f"memory a rank on the host: {in_words(rank.host)} offloaded")
    known, _ = look_at(settings["model"])
    engine = engine_memory(known.config, settings, gpu_bytes=gpu_memory())
    return [
        *lines,
        f"memory of smoke_eval: {engine}",
        f"beside that: libraries, about {in_words(LIBRARIES)} a process at most",
    ]


def _deepspeed(settings: dict[str, Any]) -> list[str]:
    asked = resolved(settings)
    try:
        config = deepspeed_config(asked, asked.world_size, gpu=has_gpu(asked.launch.device))
    except ConfigError as error:
        return [f"  none: {error}"]
    return [f"  {line}" for line in json.dumps(config, indent=2).splitlines()]
