"""Run the stages of one model: the inputs of each stage, and the settings that decide its result.

This module and `train` turn the configuration into plain arguments of stage functions;
nothing else does. Arguments passed as `config` are part of a stage's key, those passed as `context`
are not.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.chain.context import ChainRun, Delivered
from flows.chain.stages import (
    BASE,
    CONVERT,
    DATA,
    GATHER_ADAPTER,
    GATHER_WEIGHTS,
    LM_EVAL,
    MERGE,
    QUANTIZE,
    SMOKE,
    SMOKE_QUANTIZED,
)
from flows.chain.train import train_stage
from flows.orchestration.progress import progress
from tasks.config.after_training import Smoke, engine_dtype
from tasks.convert import convert
from tasks.data.kinds import PROMPTS, TEXTS
from tasks.delivery.examination import require_sound
from tasks.evaluation.prompts import PromptKind
from tasks.evaluation.responses import Measure
from tasks.evaluation.smoke import Tools
from tasks.gather import gather
from tasks.lm_eval import identity, lm_eval
from tasks.merge import merge
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.stage import Stage
from tasks.prepare import data_settings, prepare_base, prepare_data, source_identity
from tasks.quantize import quantize
from tasks.rl.reward_model import model_digest
from tasks.smoke_eval import smoke_eval
from tasks.weights.quantized.quantize import GGUF


class Chain(ChainRun):
    """Run the stages of one model in their order."""

    def deliver(self, data: Artifact) -> Delivered:
        """Run all stages after prepare_data, to smoke_eval, smoke_quantized or lm_eval."""
        base = self._prepare_base()
        trained = train_stage(self, base, data)
        gathered = self._gather(trained, base)
        adapter, weights = None, gathered
        if self.settings["peft"]["kind"] != "none":
            adapter, weights = gathered, self._merge(gathered, base, trained)
        served = self._convert(weights, trained, gathered)
        before = self.earlier.served if self.earlier else base
        smoke_stage(self, served=served, base=before, data=data, reference=gathered)
        quantized = None
        if self.settings["convert"]["quantize"] != "none":
            quantized = self._quantize(served, gathered, data)
            inputs = {"base": served, "data": data, "reference": gathered}
            smoke_stage(self, quantized=True, served=quantized, **inputs)
        if self.settings["eval"]["lm_eval"] and self.settings["train"]["objective"] != "reward":
            self._lm_eval(served, before)
        return Delivered(served, base, adapter, self.settings["peft"], quantized)

    def _prepare_base(self) -> Artifact:
        if self.earlier is not None:
            return self.earlier.base if self.continued else self.earlier.served
        model = dict(self.settings["model"])
        # Options for loading a model do not change its files, but for its own code.
        config = {k: v for k, v in model.items() if k not in _LOADING}
        if model["trust_remote_code"]:
            config["trust_remote_code"] = True
        return self._run(
            BASE,
            prepare_base,
            config={**config, "source": source_identity(**model)},
            context={"log_path": self.log_path("prepare_base"), "examine": require_sound},
            observe=progress,
        )

    def prepare_data(self) -> Artifact:
        """Run the stage prepare_data, which needs nothing of earlier steps."""
        return self._run(DATA, prepare_data, config=data_settings(self.settings))

    def _gather(self, trained: Artifact, base: Artifact) -> Artifact:
        full = self.settings["peft"]["kind"] == "none"
        return self._run(
            GATHER_WEIGHTS if full else GATHER_ADAPTER,
            gather,
            inputs={"trained": trained, "base": base},
            config={"profile": self.profile},
            context={"scorer": self.scorer, "perform": self.scorer.perform},
        )

    def _merge(self, adapter: Artifact, base: Artifact, trained: Artifact) -> Artifact:
        """Merge into the dtype and files that convert has to write, so that convert only links."""
        convert_to = self.settings["convert"]
        return self._run(
            MERGE,
            merge,
            inputs={"adapter": adapter, "base": base, "trained": trained},
            config={
                "base_mode": self.settings["merge"]["base"],
                "rounding": self.settings["merge"]["rounding"],
                "output": {key: convert_to[key] for key in ("dtype", "max_shard_size")},
                "profile": self.profile,
            },
            context={**self._measuring, "explain": self.explain},
        )

    def _convert(self, weights: Artifact, trained: Artifact, gathered: Artifact) -> Artifact:
        return self._run(
            CONVERT,
            convert,
            inputs={"weights": weights, "trained": trained, "reference": gathered},
            config={
                **{key: self.settings["convert"][key] for key in ("dtype", "max_shard_size")},
                "profile": self.profile,
            },
            context={**self._measuring, "explain": self.explain},
        )

    def _quantize(self, served: Artifact, gathered: Artifact, data: Artifact) -> Artifact:
        convert_to = self.settings["convert"]
        return self._run(
            QUANTIZE,
            quantize,
            inputs={"served": served, "reference": gathered, "data": data},
            config={
                "scheme": convert_to["quantize"],
                "max_shard_size": convert_to["max_shard_size"],
                "rows": convert_to["calibration_rows"],
                "profile": self.quantized_profile,
            },
            context={
                "scorer": self.scorer,
                "log_path": self.log_path("quantize"),
                "llama_cpp": convert_to["llama_cpp"],
            },
        )

    def _lm_eval(self, served: Artifact, before: Artifact) -> None:
        tasks, limit = (self.settings["eval"][key] for key in ("lm_eval", "lm_eval_limit"))
        self._run(
            LM_EVAL,
            lm_eval,
            inputs={"served": served, "base": before},
            config={"tasks": tasks, "files": identity(tasks), "limit": limit},
            context={"log_path": self.log_path("lm_eval")},
        )

    @property
    def _measuring(self) -> dict[str, Any]:
        return {"score": self.scorer.measure, "perform": self.scorer.perform}

    def _run(self, stage: Stage, function: Any, **arguments: Any) -> Artifact:
        arguments = {"inputs": {}, "config": {}, **arguments}
        return self.mechanism.run(stage, function, **arguments).artifact


_LOADING = ("dtype", "attn_implementation", "trust_remote_code")


def smoke_stage(run: ChainRun, *, quantized: bool = False, **inputs: Artifact) -> None:
    """Load the served model and compare it with the trained one and with the model before.

    Artifacts are `served`, `base` (the model before training; the one in 16 bits if `quantized`),
    `data` and `reference` (the output of gather, with the trained model's fingerprint).
    """
    stage = SMOKE_QUANTIZED if quantized else SMOKE
    settings = Smoke(**run.settings["smoke"])
    config: dict[str, Any] = {"attn_implementation": run.settings["model"]["attn_implementation"]}
    prompts: PromptKind = "texts" if run.rows is TEXTS else "chat"
    if run.settings["train"]["objective"] == "reward":
        prompts = "pairs"
        del inputs["base"]  # it has no reward head to compare with
    elif run.rows is PROMPTS:
        config["temperature"] = run.settings["rollout"]["temperature"]
        if (reward := _reward_model(run)) is not None:
            inputs["reward"] = reward
    if prompts == "chat" and run.settings["eval"]["function"]:
        config["function"] = Measure.of(run.settings["eval"]["function"])
    if quantized:
        config |= {"quantized": True, "max_eval_drop": run.settings["convert"]["max_eval_drop"]}
        if run.settings["convert"]["quantize"].startswith(GGUF):
            settings = replace(settings, engine="server")
    else:
        config["dtype"] = engine_dtype(run.settings)
    config |= {
        "prompts": prompts,
        "settings": settings,
        "profile": run.quantized_profile if quantized else run.profile,
    }
    tools = Tools(
        scorer=run.scorer,
        log_path=run.log_path(stage.name),
        vllm=run.vllm,
        llama_cpp=run.settings["convert"]["llama_cpp"],
        explain=run.explain,
        function_s=run.settings["eval"]["timeout_s"],
    )
    context = {"tools": tools}
    run.mechanism.run(stage, smoke_eval, inputs=inputs, config=config, context=context)


def _reward_model(run: ChainRun) -> Artifact | None:
    """Return the reward model: that of an earlier step, or the folder of `reward.model`."""
    if run.reward is not None:
        return run.reward
    if (folder := run.settings["reward"]["model"]) is None:
        return None
    return Artifact("served", Path(folder).expanduser(), model_digest(Path(folder)))
