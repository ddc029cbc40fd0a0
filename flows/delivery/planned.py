"""Plan a delivery: read SOURCE and base, decide, and refuse what cannot work. Writes nothing.

delivery = prepare_delivery(composed)
print(delivery.text(states))
DeliveryStages(delivery, mechanism, scorer).to_served()      # stages.py
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flows.cli.composed import Composed
from flows.report.card import delivery_card
from tasks.audit.run import Report
from tasks.config.checks import preflight
from tasks.config.checks.machine import smoke_engine
from tasks.config.checks.release import (
    prefect_reachable,
    public,
    quantizing,
    reachable,
)
from tasks.core.errors import ConfigError, PlumblineError, first_and_more
from tasks.core.terminal import plain, typed
from tasks.delivery import examination
from tasks.delivery.base import (
    BaseChoice,
    attention_of,
    base_mismatch_of,
    base_missing,
    choose_base,
    equals_base,
    find_base,
    undecided,
    value_findings,
)
from tasks.delivery.folders import put, require_free
from tasks.delivery.plan import (
    HandOffPlan,
    Request,
    Target,
    Work,
    describe_plan,
    megabytes,
    prepare,
)
from tasks.delivery.reference import PROBE_TOKENS, SHORTEST
from tasks.delivery.source import Checkpoint, Weighted, read_sources, weights_of
from tasks.delivery.tokens import Tokens, find_tokens
from tasks.drift.witness import Witness, find_witness
from tasks.evaluation.checks import GREEDY_TOKENS
from tasks.pipeline.artifact import remember
from tasks.pipeline.report import StageResult
from tasks.serving.vllm.job import HEADROOM
from tasks.weights.files.folder import require_own_files
from tasks.weights.quantized.quantize import GGUF
from tasks.weights.write import parse_size, require_space

_NOT_COMPARED = (
    "the base was not compared: with base=<folder> a model that equals its base is refused"
)


@dataclass(frozen=True)
class Delivery:
    """A planned and checked delivery."""

    composed: Composed
    checkpoint: Checkpoint  # SOURCE, or the first of several adapters
    adapters: tuple[Weighted, ...]  # with their weights; empty if SOURCE is no adapter
    base: Path | None  # None if none is needed
    out: Path
    work: Work
    tokens: Tokens
    choice: BaseChoice  # the base that an adapter is merged into, and the reason
    attention: str  # transformers' name of the attention implementation for measurements
    reports: tuple[Report, ...] = ()  # audits of SOURCE, or of each adapter
    warnings: tuple[str, ...] = ()  # facts that could not be checked

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration."""
        return self.composed.settings

    def planned(self) -> HandOffPlan:
        """Return the plan that the stages run."""
        return HandOffPlan(self.work, self.tokens, self.choice)

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
        config, settings = self.work.config, self.settings["smoke"]
        text = config.get("text_config") or config
        context = text.get("max_position_embeddings") or text.get("n_positions") or PROBE_TOKENS * 2
        room = settings["max_model_len"] or context - HEADROOM
        return max(SHORTEST, min(PROBE_TOKENS, room - GREEDY_TOKENS))

    @cached_property
    def witness(self) -> Witness | None:
        """Record of the live model in SOURCE; of several adapters none describes the result."""
        return find_witness(self.checkpoint.root) if len(self.adapters) <= 1 else None

    @property
    def inputs(self) -> list[Path]:
        """Folders whose files become part of the served model."""
        adapters = [adapter.checkpoint.root for adapter in self.adapters]
        roots = [self.checkpoint.root, *adapters, self.tokens.folder]
        return [*roots, *([self.base] if self.base is not None else [])]

    def put(self, served: StageResult, results: Sequence[StageResult], command: str) -> None:
        """Place the served artifact at OUT, with a model card."""
        root = self.checkpoint.root
        text = delivery_card(results, served.artifact, root, self.base, command)
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
        weights = weights_of(self.adapters).values()
        for adapter, weight in zip(self.adapters, weights, strict=False):
            yield f"adapter: {weight:g} x {adapter.checkpoint.line()}"
        if not weights:
            yield f"source: {self.checkpoint.line()}"
        if (witness := self.witness) is not None:
            yield f"witness: {witness.line()}"
        if self.base is not None:
            yield f"base: {self.base}"
        yield f"out: {self.out}"
        if self.work.merge is not None:
            through = self.choice.quantization
            bits = f", {through['type']}" if through is not None else ""
            yield f"merge into: the {self.choice.mode} base{bits} ({self.choice.reason})"
        if (scheme := self.settings["convert"]["quantize"]) != "none":
            what = "all weights" if scheme.startswith(GGUF) else "linear layers"
            yield f"quantize: {what} to {scheme}, in OUT; the model in 16 bits is kept"
        yield f"smoke test: {self.engine or 'none'}"
        yield from examination.lines(self.reports)
        yield from (f"warning: {warning}" for warning in self.warnings)

    def _plan_lines(self) -> Iterator[str]:
        """Yield a short line about the plan of each stage that writes weights."""
        for name, plan in (("gather", self.work.gather), ("merge", self.work.merge)):
            if plan is not None:
                yield f"  {name}: " + "; ".join(describe_plan(plan))
        model, scheme = self.work.model, self.settings["convert"]["quantize"]
        if self.work.converts:
            yield "  convert: " + "; ".join(describe_plan(model))
        yield f"  served: {len(model.ops)} tensors, {megabytes(model.nbytes)}"
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
    measured = smoke["engine"] != "none"
    preflight(
        [
            *reachable(tracking["uri"]),
            *(prefect_reachable() if measured else ()),
            *public(tracking),
        ]
    )
    target = Target(convert["dtype"], parse_size(convert["max_shard_size"]))
    checkpoint, adapters = read_sources(settings["source"], settings["adapters"])
    sources = [adapter.checkpoint for adapter in adapters] or [checkpoint]
    base, check_base = find_base(checkpoint, settings["base"], store), bool(settings["check_base"])
    if base is not None:
        require_own_files(base)
        if check_base:
            examination.require_base(base, whole=not settings["plan"])
    reports = examination.examine(
        [source.root for source in sources],
        base if checkpoint.kind != "model" else None,
        check_base=check_base,
    )
    warnings: list[str] = []
    for source in sources:
        warnings += _check_base(source, base, store, check_base=check_base)
    out = _folder(settings["out"])
    inputs = [*(source.root for source in sources), *([base] if base is not None else [])]
    require_free(out, inputs)
    choice = _choose_base(sources, base, settings["merge"], store)
    config = settings["adapter_config"]
    request = Request(
        checkpoint=checkpoint,
        base=base,
        target=target,
        quantization=choice.quantization,
        adapter_config=_folder(config) if config else None,
        adapters=tuple(adapters),
        rounding=settings["merge"]["rounding"],
    )
    work = prepare(request)
    refused = quantizing(convert, work.config, is_reward=work.is_reward, engine=smoke["engine"])
    preflight(list(refused))
    if work.merge is None:
        choice = BaseChoice("")
    elif not choice.mode:
        raise undecided(
            checkpoint, choice
        )  # a DeepSpeed checkpoint that turned out to be an adapter
    folders = [folder for source in sources for folder in _token_folders(source)]
    tokens = find_tokens([*folders, *([base] if base is not None else [])])
    if findings := list(tokens.findings(work)):
        raise ConfigError(
            f"tokenizer and model do not fit: {first_and_more(findings)}",
            details=findings,
            hint="put the tokenizer that belongs to the model into SOURCE's folder",
        )
    warnings += examination.require_own_ids(tokens.folder)
    attention, unable = attention_of(checkpoint, store)
    if measured:
        _require_measurable(work, smoke["engine"])
        warnings += [unable] if unable else []
    for folder in {_existing(composed.runs), _existing(out)}:
        require_space(folder, work.model.nbytes)
    return Delivery(
        composed,
        checkpoint,
        tuple(adapters),
        None if work.converts else base,  # convert alone needs the base only for its tokenizer
        out,
        work,
        tokens,
        choice,
        attention,
        reports,
        (*warnings, *choice.warnings),
    )


def _require_measurable(work: Work, engine: str) -> None:
    preflight(list(smoke_engine(engine, is_reward=work.is_reward)))
    if not (work.is_causal or work.is_reward):
        names = ", ".join(work.config.get("architectures") or ["no class"])
        raise ConfigError(
            f"smoke.engine={engine}: only causal language models and reward models are measured "
            f"here, this is {names}",
            hint="smoke.engine=none",
        )


def _check_base(
    checkpoint: Checkpoint, base: Path | None, store: Path, *, check_base: bool
) -> list[str]:
    """Raise ConfigError for a base that SOURCE was not trained on. Returns warnings.

    With `check_base=false` the reasons for a refusal are returned as warnings.
    """
    if base is None:
        if checkpoint.kind == "adapter":
            raise base_missing(checkpoint)
        return [_NOT_COMPARED] if checkpoint.kind == "model" else []
    if checkpoint.kind == "model" and check_base and equals_base(checkpoint, base):
        raise ConfigError(
            f"source={checkpoint.root}: every tensor is that of base={base}, bit for bit: nothing "
            "was merged into it",
            # where verl's merger leaves an adapter
            details=[
                f"an adapter lies in {path.parent}"
                for path in sorted(checkpoint.root.glob("*/adapter_config.json"))
            ],
            hint=f"source=<the adapter> {typed('base', base)}; check_base=false delivers it all "
            "the same",
        )
    wrong = base_mismatch_of(checkpoint, base, store)
    findings = [wrong] if wrong else []
    if checkpoint.kind == "model":
        findings += value_findings(checkpoint, base)
    if findings and check_base:
        raise ConfigError(
            f"wrong base: {first_and_more(findings)}",
            details=findings,
            hint="base=<the base that was trained>; check_base=false takes this one all the same",
        )
    return findings


def _choose_base(
    sources: list[Checkpoint], base: Path | None, merge: Mapping[str, Any], store: Path
) -> BaseChoice:
    """Choose the base to merge into, the same for all adapters. Raises ConfigError."""
    choices = [choose_base(source, base, merge, store) for source in sources]
    for source, choice in zip(sources, choices, strict=True):
        if source.kind == "adapter" and not choice.mode:
            raise undecided(source, choice)
    first = choices[0]
    if any((each.mode, each.quantization) != (first.mode, first.quantization) for each in choices):
        raise ConfigError(
            "adapters: they were trained on the base in different precisions",
            details=[
                f"{source.root}: {choice.mode}, {choice.quantization} ({choice.reason})"
                for source, choice in zip(sources, choices, strict=True)
            ],
            hint="deliver one of them, and the other into what came out: base=<the first OUT> "
            "check_base=false",
        )
    return first


def _token_folders(checkpoint: Checkpoint) -> list[Path]:
    """Return the folders that may hold a tokenizer, the best one first."""
    inside = [checkpoint.root / "tokenizer"] if checkpoint.kind == "shards" else []
    above = [checkpoint.root.parent] if checkpoint.kind in ("deepspeed", "distributed") else []
    return [*inside, checkpoint.root, *above]


def _folder(text: str) -> Path:
    return Path(text).expanduser().absolute()


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.is_dir())
