"""Run the stages of a delivery: audit, gather and the reference here, then the chain's hand-off."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from flows.chain.handoff import (
    AUDIT,
    GATHER_ADAPTER,
    GATHER_WEIGHTS,
    REFERENCE,
    HandOff,
    StageRunner,
)
from flows.delivery.planned import Delivery
from tasks.config.sections import Smoke
from tasks.delivery.base import folder_identity
from tasks.delivery.examination import examination
from tasks.delivery.reference import probe_texts, reference
from tasks.delivery.source import role, weights_of
from tasks.drift.fingerprint import PROFILES
from tasks.evaluation.checks import GREEDY_TOKENS
from tasks.evaluation.scoring import ReferenceScorer
from tasks.gather import gather_foreign
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.report import StageResult
from tasks.weights.write import parse_size
from tasks.witness.plumbline_witness.prints import FINGERPRINT


@dataclass(frozen=True)
class DeliveryStages:
    """The stages that a delivery needs; `Delivery.put` has to follow."""

    delivery: Delivery
    mechanism: StageRunner
    scorer: ReferenceScorer | None  # the transformers child; None to measure nothing

    def to_served(self) -> StageResult:
        """Run the stages in order. Returns the result of convert, or of quantize."""
        delivery, work = self.delivery, self.delivery.work
        source = _foreign(delivery.checkpoint.kind, delivery.checkpoint.root)
        base = None if delivery.base is None else _foreign("base", delivery.base)
        bases = {} if base is None else {"base": base}
        further = {
            role(index): _foreign("adapter", adapter.checkpoint.root)
            for index, adapter in enumerate(delivery.adapters)
            if index > 0
        }
        self.mechanism.run(
            AUDIT,
            examination,
            inputs={"source": source, **further, **bases},
            config={"check_base": delivery.settings["check_base"]},
            context={"reports": delivery.reports},
        )
        weights = source if work.gather is None else self._gather(source, bases)
        before = None
        if self.scorer is not None:
            before = self._reference(weights, further, bases)
        smoke = delivery.settings["smoke"]
        shared = {each.name: smoke[each.name] for each in fields(Smoke) if each.name in smoke}
        factors = weights_of(delivery.adapters)
        merge = {
            "quantization": delivery.choice.quantization,
            "rounding": delivery.settings["merge"]["rounding"],
        }
        tokenizer = {"tokenizer": delivery.tokens.identity(), "config": dict(work.config)}
        handoff = HandOff(
            mechanism=self.mechanism,
            scorer=self.scorer,
            planned=delivery.planned,
            settings=delivery.settings,
            smoke=Smoke(**shared, max_new_tokens=GREEDY_TOKENS),
            limit=PROFILES[smoke["profile"]],
            attention=delivery.attention,
            reference=before,
            # A reward model has no fingerprint to compare on the way, only scores at the end.
            is_measured=not work.is_reward,
            quantization=delivery.choice.quantization,
            dtype=delivery.dtype,
            further=further,
            factors=factors,
            merge_config={**merge, **({"weights": factors} if factors else {})},
            convert_config=tokenizer,
            policy=None if work.head is None else source,
        )
        served, quantized = handoff.to_served(weights, base if work.merge is not None else None)
        return quantized or served

    def _gather(self, source: Artifact, bases: dict[str, Artifact]) -> Artifact:
        work, inputs = self.delivery.work, {"trained": source}
        context = {"planned": self.delivery.planned}
        if work.merge is None:
            convert_to = self.delivery.settings["convert"]
            config: dict[str, Any] = {
                "dtype": convert_to["dtype"],
                "max_shard_bytes": parse_size(convert_to["max_shard_size"]),
            }
            stage, inputs = GATHER_WEIGHTS, {**inputs, **bases}
        else:
            assert work.adapter_config is not None
            text = work.adapter_config.read_bytes()
            stage, config = GATHER_ADAPTER, {"adapter_config": hashlib.sha256(text).hexdigest()}
        return self.mechanism.run(
            stage, gather_foreign, inputs=inputs, config=config, context=context
        ).artifact

    def _reference(
        self, weights: Artifact, further: dict[str, Artifact], bases: dict[str, Artifact]
    ) -> Artifact:
        delivery, smoke = self.delivery, self.delivery.settings["smoke"]
        live = None if delivery.witness is None else delivery.witness.measured
        at_live = delivery.checkpoint.root / FINGERPRINT
        if delivery.checkpoint.kind == "shards" and at_live.is_file():
            live = at_live
        inputs = {"model": weights}
        if delivery.work.merge is not None:
            inputs = {"model": bases["base"], "adapter": weights, **further}
        config = {
            "texts": probe_texts(smoke["texts"], smoke["probes"]),
            "limit": delivery.probe_tokens,
            "dtype": delivery.dtype,
            "attn_implementation": delivery.attention,
            "quantization": delivery.choice.quantization,
            "weights": weights_of(delivery.adapters),
            "is_reward": delivery.work.is_reward,
            "profile": PROFILES[smoke["profile"]],
            "live_digest": hashlib.sha256(live.read_bytes()).hexdigest() if live else "",
            "at_live": live is not None and delivery.witness is None,
        }
        context = {
            "tokenizer": delivery.tokens.folder,
            "scorer": self.scorer,
            "live": live.parent if live else None,
        }
        return self.mechanism.run(
            REFERENCE, reference, inputs=inputs, config=config, context=context
        ).artifact


def _foreign(kind: str, folder: Path) -> Artifact:
    """Return a folder from outside of the store as an artifact, with its own digest."""
    return Artifact(kind, folder, folder_identity(folder))
