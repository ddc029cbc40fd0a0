"""A planned delivery: what SOURCE is, and the plans of its weights.

delivery = prepare_delivery(composed)      # reads, plans, validates; writes nothing
print(*delivery.lines(), *delivery.plan_lines(), sep="\n")
DeliveryStages(delivery, mechanism, scorer).to_served()      # stages.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from flows.report.card import delivery_card
from tasks.audit.run import Report
from tasks.delivery import examination
from tasks.delivery.base import BaseChoice
from tasks.delivery.comparing import compare_bases, read_rows
from tasks.delivery.folders import put
from tasks.delivery.plan import Work, describe_plan, megabytes
from tasks.delivery.reference import PROBE_TOKENS, SHORTEST
from tasks.delivery.source import Given, Weighted, role, weights_of
from tasks.delivery.stages import Tokens
from tasks.drift.witness import Witness, find_witness
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.pipeline.artifact import CARD, remember
from tasks.pipeline.report import StageResult
from tasks.pipeline.signature import key_file
from tasks.release.model_card import beside
from tasks.serving.vllm.job import HEADROOM
from tasks.weights.quantized.quantize import GGUF, quantized_size


@dataclass(frozen=True)
class Delivery:
    """A planned and checked delivery.

    Attributes:
        settings: the configuration.
        runs: `paths.runs`.
        given: SOURCE, or the first of several adapters.
        adapters: the adapters with their weights; empty if SOURCE is no adapter.
        base: folder of the base; None if none is needed.
        out: OUT.
        work: the plans.
        tokens: tokenizer and generation settings of the served model.
        choice: the base that an adapter is merged into, and the reason.
        attention: transformers' name of the attention implementation for measurements.
        reports: audits of SOURCE, or of each adapter.
        warnings: facts that could not be checked.
    """

    settings: dict[str, Any]
    runs: Path
    given: Given
    adapters: tuple[Weighted, ...]
    base: Path | None
    out: Path
    work: Work
    tokens: Tokens
    choice: BaseChoice
    attention: str
    reports: tuple[Report, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def engine(self) -> str | None:
        """Engine that serves the model for the smoke test; None for no smoke test."""
        name = self.settings["smoke"]["engine"]
        return None if name == "none" else str(name)

    @property
    def store(self) -> Path:
        """Folder of the published artifacts."""
        return self.runs / "artifacts"

    @property
    def quantization(self) -> dict[str, Any] | None:
        """4-bit quantization of the base during training; None for none."""
        return self.choice.quantization

    @property
    def probe_tokens(self) -> int:
        """Length limit of a probe text in tokens, from the model's context and vLLM's limit."""
        config, settings = self.work.config, self.settings["smoke"]
        text = config.get("text_config") or config
        context = text.get("max_position_embeddings") or text.get("n_positions") or PROBE_TOKENS * 2
        room = settings["max_model_len"] or context - HEADROOM
        return max(SHORTEST, min(PROBE_TOKENS, room - settings["greedy_tokens"]))

    @cached_property
    def witness(self) -> Witness | None:
        """Record of the live model in SOURCE; of several adapters none describes the result."""
        return find_witness(self.given.root) if len(self.adapters) <= 1 else None

    @property
    def inputs(self) -> tuple[Path, ...]:
        """Folders whose files become part of the served model."""
        adapters = [adapter.given.root for adapter in self.adapters]
        roots = [self.given.root, *adapters, self.tokens.folder]
        return tuple(dict.fromkeys([*roots, *([self.base] if self.base is not None else [])]))

    def compare(self, scorer: ReferenceScorer) -> Iterator[str]:
        """Yield lines that compare both merges of an adapter, for `merge.base=compare`."""
        assert self.base is not None
        assert self.quantization is not None
        weights = weights_of(self.adapters)
        roots = {role(index): each.given.root for index, each in enumerate(self.adapters)}
        smoke = self.settings["smoke"]
        tokenizer = self.tokens.folder
        rows = read_rows(
            smoke["texts"], smoke["probes"],
            tokenizer=tokenizer, limit=self.probe_tokens, scorer=scorer,
        )  # fmt: skip
        model = ModelRef(
            self.base,
            self.given.root,
            dtype=str(self.work.config.get("dtype") or self.settings["convert"]["dtype"]),
            attn_implementation=self.attention,
            weighted={str(roots[name]): weight for name, weight in weights.items()} or None,
        )
        is_reward = self.work.is_reward
        return compare_bases(model, self.quantization, rows, scorer=scorer, is_reward=is_reward)

    def put(self, served: StageResult, results: Sequence[StageResult], command: str) -> None:
        """Copy the served artifact to OUT, with a model card, and sign it there.

        Args:
            served: result of the last stage that wrote a model.
            results: those of all stages.
            command: what was typed.
        """
        root = self.given.root
        text = delivery_card(results, served.artifact, root, self.base, command)
        key = key_file(self.settings["register"]["sign"])
        put(served.artifact, self.out, key, beside(text, root / CARD))
        for result in results:  # convert's hard links changed ctimes
            remember(result.artifact, self.store / ".seen")

    def lines(self) -> Iterator[str]:
        """Yield the plan's lines about SOURCE, base, OUT and the choices that were made."""
        weights = weights_of(self.adapters).values()
        for adapter, weight in zip(self.adapters, weights, strict=False):
            yield f"adapter: {weight:g} x {adapter.given.line()}"
        if not weights:
            yield f"source: {self.given.line()}"
        if (witness := self.witness) is not None:
            yield f"witness: {witness.line()}"
        if self.base is not None:
            yield f"base: {self.base}"
        yield f"out: {self.out}"
        if self.work.merge is not None:
            bits = f", {self.quantization['type']}" if self.quantization is not None else ""
            yield f"merge into: the {self.choice.mode} base{bits} ({self.choice.reason})"
        if self.settings["convert"]["quantize"] != "none":
            scheme = self.settings["convert"]["quantize"]
            what = "all weights" if scheme.startswith(GGUF) else "linear layers"
            yield f"quantize: {what} to {scheme}, in OUT; the model in 16 bits is kept"
        yield f"smoke test: {self.engine or 'none'}"
        if self.settings["register"]["sign"] is not None:
            yield f"sign: with {self.settings['register']['sign']}"
        if self.settings["push"] is not None:
            yield f"push: to {self.settings['push']}, if every check passes"
        yield from examination.lines(self.reports)
        yield from (f"warning: {warning}" for warning in self.warnings)

    def plan_lines(self) -> Iterator[str]:
        """Yield a short line about the plan of each stage that writes weights."""
        for name, plan in (("gather", self.work.gather), ("merge", self.work.merge)):
            if plan is not None:
                yield f"  {name}: " + "; ".join(describe_plan(plan))
        if self.work.converts:
            yield "  convert: " + "; ".join(describe_plan(self.work.model))
        yield f"  served: {len(self.work.model.ops)} tensors, {megabytes(self.work.model.nbytes)}"
        if self.settings["convert"]["quantize"] != "none":
            shapes = {op.name: op.shape for op in self.work.model.ops}
            linear = sum(prod(shapes[name]) for name in self.work.facts.quantized)
            size = quantized_size(self.work.model.nbytes, linear, self.settings["convert"])
            yield f"  quantized: {self.settings['convert']['quantize']}, {megabytes(size)}"
