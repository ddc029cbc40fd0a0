"""Run the stages of a delivery: audit, gather and the reference here, then the chain's hand-off."""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
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
from tasks.drift.fingerprint import PROFILES
from tasks.evaluation.checks import GREEDY_TOKENS
from tasks.evaluation.scoring import ReferenceScorer
from tasks.gather import gather_foreign
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.locks import Needs
from tasks.pipeline.stage import StageResult
from tasks.weights.write import parse_size
from tasks.witness.plumbline_witness.prints import FINGERPRINT


def to_served(
    delivery: Delivery, mechanism: StageRunner, scorer: ReferenceScorer | None
) -> StageResult:
    """Run the stages in order; `Delivery.put` has to follow.

    `scorer` is the transformers child, None to measure nothing. Returns the result of convert, or
    of quantize.
    """
    work, settings = delivery.work, delivery.settings
    source = _foreign(delivery.source.kind, delivery.source.root)
    base = None if delivery.base is None else _foreign("base", delivery.base)
    bases = {} if base is None else {"base": base}
    mechanism.run(
        AUDIT,
        examination,
        inputs={"source": source, **bases},
        config={"check_base": settings["check_base"]},
        context={"report": delivery.report},
    )
    weights = source if work.gather is None else _gather(delivery, mechanism, source, bases)
    before = None
    if scorer is not None:
        before = _reference(delivery, mechanism, scorer, weights, bases)
    smoke, quantization = settings["smoke"], work.choice.quantization
    shared = {each.name: smoke[each.name] for each in fields(Smoke) if each.name in smoke}
    merge_config = {"quantization": quantization, "rounding": settings["merge"]["rounding"]}
    handoff = HandOff(
        mechanism=mechanism,
        scorer=scorer,
        planned=lambda: work,
        settings=settings,
        smoke=Smoke(**shared, max_new_tokens=GREEDY_TOKENS),
        limit=PROFILES[smoke["profile"]],
        attention=delivery.attention,
        reference=before,
        # A reward model has no fingerprint to compare on the way, only scores at the end.
        is_measured=not work.is_reward,
        quantization=quantization,
        dtype=delivery.dtype,
        merge_config=merge_config,
        convert_config={"tokenizer": work.tokens.identity(), "config": dict(work.config)},
        policy=None if work.head is None else source,
    )
    served, quantized = handoff.to_served(weights, base if work.merges else None)
    return quantized or served


def _gather(
    delivery: Delivery, mechanism: StageRunner, source: Artifact, bases: dict[str, Artifact]
) -> Artifact:
    work, inputs, convert = delivery.work, {"trained": source}, delivery.settings["convert"]
    if work.adapter_config is not None:
        text = work.adapter_config.read_bytes()
        stage = GATHER_ADAPTER
        config: dict[str, Any] = {"adapter_config": hashlib.sha256(text).hexdigest()}
    else:
        stage, inputs = GATHER_WEIGHTS, {**inputs, **bases}
        limit = parse_size(convert["max_shard_size"])
        config = {"dtype": convert["dtype"], "max_shard_bytes": limit}
    context = {"planned": lambda: work}
    stage = replace(stage, needs=Needs.NOTHING)  # not measured
    return mechanism.run(
        stage, gather_foreign, inputs=inputs, config=config, context=context
    ).artifact


def _reference(
    delivery: Delivery,
    mechanism: StageRunner,
    scorer: ReferenceScorer,
    weights: Artifact,
    bases: dict[str, Artifact],
) -> Artifact:
    work, smoke = delivery.work, delivery.settings["smoke"]
    live = None if delivery.witness is None else delivery.witness.measured
    at_live = delivery.source.root / FINGERPRINT
    if delivery.source.kind == "shards" and at_live.is_file():
        live = at_live
    inputs = {"model": weights}
    if work.merges:
        inputs = {"model": bases["base"], "adapter": weights}
    config = {
        "texts": probe_texts(smoke["texts"], smoke["probes"]),
        "limit": delivery.probe_tokens,
        "dtype": delivery.dtype,
        "attn_implementation": delivery.attention,
        "quantization": work.choice.quantization,
        "is_reward": work.is_reward,
        "profile": PROFILES[smoke["profile"]],
        "live_digest": hashlib.sha256(live.read_bytes()).hexdigest() if live else "",
        "at_live": live is not None and delivery.witness is None,
    }
    context = {
        "tokenizer": work.tokens.folder,
        "scorer": scorer,
        "live": live.parent if live else None,
    }
    return mechanism.run(
        REFERENCE, reference, inputs=inputs, config=config, context=context
    ).artifact


def _foreign(kind: str, folder: Path) -> Artifact:
    """Return a folder from outside of the store as an artifact, with its own digest."""
    return Artifact(kind, folder, folder_identity(folder))
