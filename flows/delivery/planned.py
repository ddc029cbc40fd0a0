"""Plan a delivery: read SOURCE and base, decide, and refuse what cannot work. Writes nothing.

delivery = prepare_delivery(composed)
print(delivery.text(states))
to_served(delivery, mechanism, scorer)      # run_delivery.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flows.cli.composed import Composed
from flows.cli.output import folder
from flows.report.card import delivery_card
from tasks.audit.run import Report
from tasks.audit.source import Kind, Source, open_source
from tasks.config.checks.machine import smoke_engine
from tasks.config.checks.quantized import quantizing
from tasks.config.checks.servers import prefect_reachable, public, reachable
from tasks.core.errors import ConfigError, PlumblineError, first_and_more, preflight
from tasks.core.terminal import in_words, plain
from tasks.delivery.base import attention_of, choose_base, find_base, undecided, wrong_base
from tasks.delivery.folders import put, require_free
from tasks.delivery.plan import Request, Work, describe_plan, prepare
from tasks.delivery.reference import PROBE_TOKENS, SHORTEST
from tasks.delivery.source import (
    audit_lines,
    examine,
    open_folder,
    require_base,
    require_own_ids,
)
from tasks.delivery.tokens import find_tokens
from tasks.drift.witness import Witness, find_witness
from tasks.evaluation.checks import GREEDY_TOKENS
from tasks.pipeline.artifact import remember
from tasks.pipeline.stage import StageResult
from tasks.weights.files.folder import require_own_files
from tasks.weights.quantized.quantize import GGUF
from tasks.weights.write import parse_size, require_space


@dataclass(frozen=True)
class Delivery:
    """A planned and checked delivery."""

    composed: Composed
    source: Source
    base: Path | None  # None if none is needed
    out: Path
    work: Work
    attention: str  # transformers' name of the attention implementation for measurements
    report: Report  # audit of SOURCE
    warnings: tuple[str, ...] = ()  # facts that could not be checked

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration."""
        return self.composed.settings

    @property
    def engine(self) -> str | None:
        """Engine that serves the model for the smoke test; None for no smoke test."""
        name = self.settings["smoke"]["engine"]
        return None if name == "none" else str(name)

    @property
    def store(self) -> Path:
        """Folder of the published artifacts."""
        return self.composed.runs / "artifacts"

    @property
    def dtype(self) -> str:
        """Torch name of the dtype in which the model of SOURCE is measured."""
        return str(self.work.config.get("dtype") or self.settings["convert"]["dtype"])

    @property
    def probe_tokens(self) -> int:
        """Length limit of a probe text in tokens, from the model's context and vLLM's limit."""
        from tasks.serving.vllm.job import HEADROOM

        config, settings = self.work.config, self.settings["smoke"]
        text = config.get("text_config") or config
        context = text.get("max_position_embeddings") or text.get("n_positions") or PROBE_TOKENS * 2
        room = settings["max_model_len"] or context - HEADROOM
        return max(SHORTEST, min(PROBE_TOKENS, room - GREEDY_TOKENS))

    @cached_property
    def witness(self) -> Witness | None:
        """Record of the live model in SOURCE; None if it has none."""
        return find_witness(self.source.root)

    @property
    def inputs(self) -> list[Path]:
        """Folders whose files become part of the served model."""
        bases = [self.base] if self.base is not None else []
        return [self.source.root, self.work.tokens.folder, *bases]

    def put(self, served: StageResult, results: Sequence[StageResult], command: str) -> None:
        """Place the served artifact at OUT, with a model card."""
        text = delivery_card(results, served.artifact, self.source.root, self.base, command)
        put(served.artifact, self.out, text)
        for result in results:  # hard links changed ctimes
            remember(result.artifact, self.store / ".seen")

    def text(self, states: Sequence[tuple[str, str]]) -> str:
        """Return the plan for the terminal; `states` are those of the stages, in order."""
        stages = [f"  {name:<11} {state}" for name, state in states]
        runs = f"runs: {self.composed.runs}"
        lines = [*self._lines(), runs, "stages:", *stages, "weights:", *self._plan_lines()]
        return plain("\n".join(lines))

    def _lines(self) -> Iterator[str]:
        """Yield the plan's lines about SOURCE, base, OUT and the choices that were made."""
        yield f"source: {self.source.line()}"
        if (witness := self.witness) is not None:
            yield f"witness: {witness.line()}"
        if self.base is not None:
            yield f"base: {self.base}"
        yield f"out: {self.out}"
        choice = self.work.choice
        if choice.mode:
            bits = f", {choice.quantization['type']}" if choice.quantization is not None else ""
            yield f"merge into: the {choice.mode} base{bits} ({choice.reason})"
        if (scheme := self.settings["convert"]["quantize"]) != "none":
            what = "all weights" if scheme.startswith(GGUF) else "linear layers"
            yield f"quantize: {what} to {scheme}, in OUT; the model in 16 bits is kept"
        yield f"smoke test: {self.engine or 'none'}"
        yield from audit_lines(self.report)
        yield from (f"warning: {warning}" for warning in self.warnings)

    def _plan_lines(self) -> Iterator[str]:
        """Yield a short line about the plan of each stage that writes weights."""
        work, scheme = self.work, self.settings["convert"]["quantize"]
        plans = {"gather": work.gather, "merge": work.plan if work.merges else None}
        plans["convert"] = work.plan if work.converts else None
        yield from (f"  {name}: {describe_plan(plan)}" for name, plan in plans.items() if plan)
        yield f"  served: {len(work.plan.ops)} tensors, {in_words(work.plan.nbytes)}"
        if scheme != "none":
            yield f"  quantized: {scheme}"


def prepare_delivery(composed: Composed) -> Delivery:
    """Read SOURCE and base, plan, and run all checks that need no written file."""
    try:
        return _prepare(composed)
    except ConfigError:
        raise
    except PlumblineError as error:
        raise ConfigError(error.message, details=error.details, hint=error.hint) from error


def _prepare(composed: Composed) -> Delivery:
    settings, store = composed.settings, composed.runs / "artifacts"
    smoke, convert, tracking = settings["smoke"], settings["convert"], settings["tracking"]
    measured, check = smoke["engine"] != "none", bool(settings["check_base"])
    servers = [*reachable(tracking["uri"]), *(prefect_reachable() if measured else ())]
    preflight([*servers, *public(tracking)])
    max_shard_bytes = parse_size(convert["max_shard_size"])
    source, opened = open_folder(folder(settings["source"])), None
    base = find_base(source, settings["base"], store)
    if base is not None:
        require_own_files(base)
        # The merge reads the values, and refuses those that are not finite.
        opened = require_base(base, values=False) if check else open_source(base)
    if not source.is_model:
        source.base = opened
    report = examine(source, check_base=check)
    warnings = wrong_base(source, opened, store, check=check)
    out, bases = folder(settings["out"]), [base] if base is not None else []
    require_free(out, [source.root, *bases])
    choice = choose_base(source, base, settings["merge"], store)
    if source.is_adapter and not choice.mode:
        raise undecided(source, choice)
    config = settings["adapter_config"]
    request = Request(
        source=source,
        base=base,
        tokens=find_tokens([*_token_folders(source), *bases]),
        dtype=convert["dtype"],
        max_shard_bytes=max_shard_bytes,
        choice=choice,
        adapter_config=folder(config) if config else None,
        rounding=settings["merge"]["rounding"],
        scanned=report.values,
    )
    work = prepare(request)
    engine = smoke["engine"]
    preflight(list(quantizing(convert, work.config, is_reward=work.is_reward, engine=engine)))
    if findings := list(work.tokens.findings(work)):
        raise ConfigError(
            f"tokenizer and model do not fit: {first_and_more(findings)}",
            details=findings,
            hint="put the tokenizer that belongs to the model into SOURCE's folder",
        )
    with tempfile.TemporaryDirectory() as served:  # the files of which convert asks again
        work.tokens.write(Path(served), work, convert["dtype"])
        warnings += require_own_ids(work.tokens.folder, Path(served))
    attention, unable = attention_of(source, store)
    if measured:
        _require_measurable(work, engine)
        warnings += [unable] if unable else []
    for place in (composed.runs, out):
        require_space(place, work.plan.nbytes)
    return Delivery(
        composed,
        source,
        None if work.converts else base,  # convert alone needs the base only for its tokenizer
        out,
        work,
        attention,
        report,
        (*warnings, *work.choice.warnings),
    )


def _require_measurable(work: Work, engine: str) -> None:
    preflight(list(smoke_engine(engine, work.config, is_reward=work.is_reward)))
    if not (work.is_causal or work.is_reward):
        names = ", ".join(work.config.get("architectures") or ["no class"])
        raise ConfigError(
            f"smoke.engine={engine}: only causal language models and reward models are measured "
            f"here, this is {names}",
            hint="smoke.engine=none",
        )


def _token_folders(source: Source) -> list[Path]:
    """Return the folders that may hold a tokenizer, the best one first."""
    inside = [source.root / "tokenizer"] if source.kind is Kind.SHARDS else []
    above = [source.root.parent] if source.kind in (Kind.DEEPSPEED, Kind.DISTRIBUTED) else []
    return [*inside, source.root, *above]
