"""Run the stages of one model: prepare and train it, gather its partitions, and hand it off.

This module and `handoff` turn the configuration into plain arguments of stage functions;
nothing else does. Arguments passed as `config` are part of a stage's key, those passed as `context`
are not.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from flows.chain.handoff import (
    BASE,
    DATA,
    GATHER_ADAPTER,
    GATHER_WEIGHTS,
    LM_EVAL,
    REINFORCE,
    ROLLOUT_BASE,
    TRAIN,
    HandOff,
    StageRunner,
)
from flows.chain.steps import continues
from flows.monitoring import Progress
from tasks.config.sections import Smoke, engine_dtype
from tasks.core.redaction import redact_url
from tasks.data.kinds import PROMPTS, TEXTS, Kind, kind_for, names_texts
from tasks.delivery.plan import Work, plan_trained
from tasks.delivery.source import require_sound
from tasks.drift.fingerprint import PROFILES
from tasks.evaluation.responses import Measure
from tasks.evaluation.scoring import ReferenceScorer
from tasks.gather import gather
from tasks.lm_eval import identity, lm_eval
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import Stage, StageReport, plain
from tasks.prepare import data_settings, prepare_base, prepare_data, source_identity
from tasks.process.multinode import Leader
from tasks.rl.reward_model import model_digest
from tasks.rl.rewards import sources_digest
from tasks.rollout_base import rollout_base
from tasks.serving.vllm.job import VllmChild
from tasks.train import train
from tasks.training.job import Settings
from tasks.training.tokens.truncation import refuse_truncated
from tasks.weights.write import parse_size


@dataclass(frozen=True)
class Delivered:
    """Results of a step, from which the next one starts: models, and section `peft` of the step.

    `adapter` is None if all weights were trained, `quantized` without `convert.quantize`.
    """

    served: Artifact
    base: Artifact
    adapter: Artifact | None
    peft: Mapping[str, Any]
    quantized: Artifact | None = None


@dataclass(frozen=True)
class Chain:
    """Run the stages of one model in their order."""

    settings: Mapping[str, Any]
    mechanism: StageRunner
    scorer: ReferenceScorer  # the transformers reference
    vllm: VllmChild = field(default_factory=VllmChild)  # serves the models
    leader: Leader | None = None  # asks the other nodes for their ranks; None on one node
    earlier: Delivered | None = None  # the step before; None to start from `model.path`
    reward: Artifact | None = None  # the reward model that an earlier step trained

    @property
    def rows(self) -> Kind:
        """Kind of rows that the objective trains and is evaluated on."""
        texts = names_texts(self.settings["data"])
        return kind_for(self.settings["train"]["objective"], texts=texts)

    def prepare_data(self) -> Artifact:
        """Run the stage prepare_data, which needs nothing of earlier steps."""
        return self._run(DATA, prepare_data, config=data_settings(self.settings))

    def deliver(
        self,
        data: Artifact,
        base: Artifact | None = None,
        first: Callable[[], None] | None = None,
    ) -> Delivered:
        """Run all stages after prepare_data (and `base`), the last ones smoke_eval or lm_eval.

        `first` is called before a training, and not before a reused one.
        """
        peft, base = self.settings["peft"], base or self.prepare_base()
        trained = self._train(base, data, first)
        is_adapter = peft["kind"] != "none"
        gathered = self._run(
            GATHER_ADAPTER if is_adapter else GATHER_WEIGHTS,
            gather,
            inputs={"trained": trained, "base": base},
            config={"profile": PROFILES[self.settings["gate"]["profile"]]},
            context={"scorer": self.scorer, "perform": self.scorer.perform},
        )
        before = self.earlier.served if self.earlier else base
        handoff = self._hand_off(trained, gathered, base, before, data)
        served, quantized = handoff.to_served(gathered, base if is_adapter else None)
        tasks, limit = (self.settings["eval"][key] for key in ("lm_eval", "lm_eval_limit"))
        if tasks and self.settings["train"]["objective"] != "reward":
            self._run(
                LM_EVAL,
                lm_eval,
                inputs={"served": served.artifact, "base": before},
                config={"tasks": tasks, "files": identity(tasks), "limit": limit},
                context={"log_path": self.mechanism.logs / "lm_eval.log"},
            )
        adapter = gathered if is_adapter else None
        last = quantized.artifact if quantized else None
        return Delivered(served.artifact, base, adapter, peft, last)

    def _train(self, base: Artifact, data: Artifact, first: Callable[[], None] | None) -> Artifact:
        """Train the base, or the adapter of the step before further: the `shards` artifact."""
        section, stage, mechanism = self.settings, TRAIN, self.mechanism
        settings, inputs = resolved(section), {"base": base, "data": data}
        if self._continued is not None:
            inputs["adapter"] = self._continued
        if settings.online:
            stage = REINFORCE
            if self.reward is not None:
                inputs["reward"] = self.reward
            quantization = settings.peft.quantization(settings.dtype)
            if quantization is not None:
                inputs["rollout"] = self._run(
                    ROLLOUT_BASE,
                    rollout_base,
                    inputs={"base": base},
                    config={"quantization": quantization, "dtype": settings.dtype},
                    context={"perform": self.scorer.perform},
                )
        config = {"settings": settings}
        # One folder per result, so that the next run finds the checkpoints of an interrupted one.
        checkpoints = mechanism.store.parent / "checkpoints" / stage.key(plain(config), inputs)

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
                "log_path": mechanism.logs / "train.log",
                "leader": self.leader,
            },
            observe=self._observe,
        )
        if result.artifact.digest:
            refuse_cut_rows(section, result.artifact)
        if not result.reused and not section["train"]["keep_ckpts"]:
            # Checkpoints only serve an interrupted run, and this result is published. A plan, which
            # comes before every run, trains nothing: those of an interrupted run are still needed.
            shutil.rmtree(checkpoints, ignore_errors=True)
        return result.artifact

    def _observe(self, record: Any, log: Any) -> Callable[[dict[str, Any]], None]:
        """Show the progress of a training, and let the next children import meanwhile.

        The scorer imports while the ranks train, and vLLM while weights are gathered and merged: it
        takes a core for longer.
        """
        shown, smoke = Progress(record, log), Smoke(**self.settings["smoke"])

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "plan":
                self.scorer.warm()
            if event["event"] == "done" and smoke.engine == "vllm":
                self.vllm.warm(smoke, log=log, log_path=self.mechanism.logs / "smoke_eval.log")
            shown(event)

        return on_event

    def prepare_base(self) -> Artifact:
        """Run the stage prepare_base, or return the model that the step before serves."""
        if self.earlier is not None:
            return self.earlier.base if self._continued else self.earlier.served
        model = dict(self.settings["model"])
        # Options for loading a model do not change its files, but for its own code.
        config = {k: v for k, v in model.items() if k not in _LOADING}
        if model["trust_remote_code"]:
            config["trust_remote_code"] = True
        log_path = self.mechanism.logs / "prepare_base.log"
        return self._run(
            BASE,
            prepare_base,
            config={**config, "source": source_identity(**model)},
            context={"log_path": log_path, "examine": require_sound},
            observe=Progress,
        )

    @property
    def _continued(self) -> Artifact | None:
        """Adapter that this step trains further; None for a new one."""
        if self.earlier is None or not continues(self.earlier.peft, self.settings["peft"]):
            return None
        return self.earlier.adapter

    def _hand_off(
        self,
        trained: Artifact,
        gathered: Artifact,
        base: Artifact,
        before: Artifact,  # the model before training, which is evaluated, too
        data: Artifact,
    ) -> HandOff:
        settings, training = self.settings, resolved(self.settings)
        merge, convert_to = settings["merge"], settings["convert"]

        @cache
        def planned() -> Work:
            paths = trained.path, gathered.path, base.path
            limit = parse_size(convert_to["max_shard_size"])
            how = {"dtype": convert_to["dtype"], "max_shard_bytes": limit}
            return plan_trained(*paths, merge, perform=self.scorer.perform, **how)

        inputs, config = self._smoke(before, data)
        return HandOff(
            mechanism=self.mechanism,
            scorer=self.scorer,
            vllm=self.vllm,
            planned=planned,
            settings=settings,
            smoke=Smoke(**settings["smoke"]),
            limit=PROFILES[settings["gate"]["profile"]],
            attention=settings["model"]["attn_implementation"],
            reference=gathered,
            quantization=training.peft.quantization(training.dtype),
            dtype=training.dtype,
            merge_config={"mode": merge["base"], "rounding": merge["rounding"]},
            smoke_inputs=inputs,
            smoke_config=config,
            data=data,
            shards=trained,
        )

    def _smoke(
        self, before: Artifact, data: Artifact
    ) -> tuple[dict[str, Artifact], dict[str, Any]]:
        """Return the further inputs and settings of smoke_eval, by the rows of the objective."""
        config: dict[str, Any] = {"dtype": engine_dtype(self.settings)}
        inputs = {"base": before, "data": data}
        if self.settings["train"]["objective"] == "reward":
            return inputs, {**config, "prompts": "pairs"}
        if self.rows is TEXTS:
            return inputs, {**config, "prompts": "texts"}
        config["prompts"] = "chat"
        if self.rows is PROMPTS:
            config["temperature"] = self.settings["rollout"]["temperature"]
            folder = self.settings["reward"]["model"]
            if self.reward is not None:
                inputs["reward"] = self.reward
            elif folder is not None:
                path = Path(folder)
                inputs["reward"] = Artifact("served", path.expanduser(), model_digest(path))
        if function := self.settings["eval"]["function"]:
            config["function"] = Measure.of(function)
        return inputs, config

    def _run(self, stage: Stage, function: Any, **arguments: Any) -> Artifact:
        arguments = {"inputs": {}, "config": {}, **arguments}
        return self.mechanism.run(stage, function, **arguments).artifact


_LOADING = ("dtype", "attn_implementation", "trust_remote_code")


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
