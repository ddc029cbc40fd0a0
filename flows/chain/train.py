"""Run the stage `train` of a chain: offline or online, with its inputs and its checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flows.chain.handoff import REINFORCE, ROLLOUT_BASE, TRAIN, StageRunner
from flows.orchestration.progress import Progress
from tasks.config.sections import Smoke
from tasks.core.redaction import redact_url
from tasks.data.kinds import PROMPTS, names_texts
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.report import StageReport
from tasks.pipeline.stage import plain
from tasks.process.multinode import Leader
from tasks.rl.rewards import sources_digest
from tasks.rollout_base import rollout_base
from tasks.serving.vllm.job import VllmChild
from tasks.train import train
from tasks.training.job import Settings
from tasks.training.tokens.truncation import refuse_truncated


def train_stage(
    section: Mapping[str, Any],
    mechanism: StageRunner,
    scorer: ReferenceScorer,
    vllm: VllmChild,
    *,
    inputs: dict[str, Artifact],
    reward: Artifact | None,
    leader: Leader | None,
    first: Callable[[], None] | None = None,
) -> Artifact:
    """Train a base on data (`inputs`), perhaps an adapter further. Returns the `shards` artifact.

    `section` has the settings of the step; `reward` is the reward model of an earlier one. `first`
    is called before a training, and not before a reused one.
    """
    settings, stage, base = resolved(section), TRAIN, inputs["base"]
    if settings.online:
        stage = REINFORCE
        inputs |= {"reward": reward} if reward is not None else {}
        quantization = settings.peft.quantization(settings.dtype)
        if quantization is not None:
            inputs["rollout"] = mechanism.run(
                ROLLOUT_BASE,
                rollout_base,
                inputs={"base": base},
                config={"quantization": quantization, "dtype": settings.dtype},
                context={"perform": scorer.perform},
            ).artifact
    config = {"settings": settings}
    # One folder per result, so that the next run finds the checkpoints of an interrupted one.
    checkpoints = mechanism.store.parent / "checkpoints" / stage.key(plain(config), inputs)
    smoke, logs = Smoke(**section["smoke"]), mechanism.logs

    def observe(record: Any, log: Any) -> Callable[[dict[str, Any]], None]:
        """Show progress, and let the next children import their libraries meanwhile.

        The scorer imports while the ranks train, and vLLM while weights are gathered and merged: it
        takes a core for longer.
        """
        shown = Progress(record, log)

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "plan":
                scorer.warm()
            if event["event"] == "done" and smoke.engine == "vllm":
                vllm.warm(smoke, log=log, log_path=logs / "smoke_eval.log")
            shown(event)

        return on_event

    def work(out: Path, **arguments: Any) -> StageReport:
        if first is not None:
            first()
        return train(out, **arguments)

    result = mechanism.run(
        stage,
        work,
        inputs=inputs,
        config=config,
        context={
            "base_digest": base.digest,
            "checkpoints": checkpoints,
            "resume": section["train"]["resume"],
            "max_truncated": section["data"]["max_truncated"],
            "reward_url": section["reward"]["url"],
            "log_path": logs / "train.log",
            "leader": leader,
        },
        observe=observe,
    )
    if result.artifact.digest:
        refuse_cut_rows(section, result.artifact)
    if not result.reused and not section["train"]["keep_ckpts"]:
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
