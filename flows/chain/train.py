"""Run the stage `train` of a chain: offline or online, with its inputs and its checkpoints."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from flows.chain.context import ChainRun
from flows.chain.stages import REINFORCE, ROLLOUT_BASE, TRAIN
from flows.orchestration.progress import progress
from tasks.config.after_training import Smoke
from tasks.core.redaction import redact_url
from tasks.data.kinds import PROMPTS, names_texts
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.report import StageRecord
from tasks.pipeline.stage import plain
from tasks.rl.rewards import sources_digest
from tasks.rollout_base import rollout_base
from tasks.train import train
from tasks.training.job import Settings
from tasks.training.tokens.truncation import refuse_truncated


def train_stage(run: ChainRun, base: Artifact, data: Artifact) -> Artifact:
    """Train a base on data. Returns the `shards` artifact."""
    settings = resolved(run.settings)
    inputs, config = {"base": base, "data": data}, {"settings": settings}
    if run.continued is not None:
        inputs["adapter"] = run.continued
    stage = TRAIN
    if settings.online:
        stage, inputs = REINFORCE, {**inputs, **_online_inputs(run, base, settings)}
    # One folder per result, so that the next run finds the checkpoints of an interrupted one.
    key = stage.key(plain(config), inputs)
    checkpoints = run.mechanism.store.parent / "checkpoints" / key
    result = run.mechanism.run(
        stage,
        train,
        inputs=inputs,
        config=config,
        context={
            "base_digest": base.digest,
            "checkpoints": checkpoints,
            "resume": run.settings["train"]["resume"],
            "max_truncated": run.settings["data"]["max_truncated"],
            "reward_url": run.settings["reward"]["url"],
            "log_path": run.log_path("train"),
            "leader": run.leader,
        },
        observe=partial(_observe, run),
    )
    if result.artifact.digest:
        refuse_cut_rows(run.settings, result.artifact)
    if not result.reused and not run.settings["train"]["keep_ckpts"]:
        # Checkpoints only serve an interrupted run, and this result is published. A plan, which
        # comes before every run, trains nothing: those of an interrupted run are still needed.
        shutil.rmtree(checkpoints, ignore_errors=True)
    return result.artifact


def refuse_cut_rows(settings: Mapping[str, Any], trained: Artifact) -> None:
    """Apply `data.max_truncated` to a reused result, as the ranks do to a new one.

    The limit accepts or refuses a result and does not change it, so it is not part of the key.
    """
    counts = trained.notes.get("data", {}).get("train")
    if counts is not None:
        refuse_truncated(
            counts,
            source="train.jsonl",
            max_len=settings["train"]["max_len"],
            most=settings["data"]["max_truncated"],
            texts=names_texts(settings["data"]),
        )


def _online_inputs(run: ChainRun, base: Artifact, settings: Settings) -> dict[str, Artifact]:
    """Return the further inputs of online training: reward model and rollout weights."""
    inputs = {} if run.reward is None else {"reward": run.reward}
    quantization = settings.peft.quantization(settings.dtype)
    if quantization is not None:
        inputs["rollout"] = run.mechanism.run(
            ROLLOUT_BASE,
            rollout_base,
            inputs={"base": base},
            config={"quantization": quantization, "dtype": settings.dtype},
            context={"perform": run.scorer.perform},
        ).artifact
    return inputs


@contextlib.contextmanager
def _observe(run: ChainRun, record: StageRecord, log: Any) -> Iterator[Callable[[Any], None]]:
    """Show progress, and let the next children import their libraries.

    The scorer imports while the ranks train, and vLLM while weights are gathered and merged: it
    takes a core for longer.
    """
    smoke = Smoke(**run.settings["smoke"])
    with progress(record, log) as shown:

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "plan":
                run.scorer.warm()
            if event["event"] == "done" and smoke.engine == "vllm":
                run.vllm.warm(smoke, log=log, log_path=run.log_path("smoke_eval"))
            shown(event)

        yield on_event


def resolved(settings: Mapping[str, Any]) -> Settings:
    """Return the typed training settings of a configuration.

    They are recorded, so they have no login or token of `reward.url`. A new token is thus no new
    training.
    """
    sections = {name: settings[name] for name in ("train", "peft", "zero", "model", "seed")}
    if settings["train"]["objective"] not in PROMPTS.objectives:
        return Settings.from_sections(**sections)
    reward = dict(settings["reward"])
    reward["url"] = redact_url(reward["url"]) if reward["url"] else None
    online = {
        "rl": settings["rl"],
        "rollout": settings["rollout"],
        "reward": {**reward, "digest": sources_digest(reward, settings["rl"]["environment"])},
    }
    return Settings.from_sections(**sections, online=online)
