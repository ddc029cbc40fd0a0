"""The chain of a delivery: what SOURCE is, what has to be done with it, and who reads what.

delivery = prepare_delivery(composed)      # recognises, plans, validates; writes nothing
print(*delivery.lines(), *delivery.plan_lines(), sep="\n")
delivery.run(mechanism, scorer)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.delivery.stages import Steps
from tasks.audit.run import Report
from tasks.delivery import examination
from tasks.delivery.engine import SHORTEST
from tasks.delivery.plan.adapters import Weighted, role, weights_of
from tasks.delivery.plan.comparing import compare_bases, read_rows
from tasks.delivery.plan.quantization import BaseChoice
from tasks.delivery.plan.work import Work, describe_plan, megabytes
from tasks.delivery.publish_output import put
from tasks.delivery.recognise import Given
from tasks.delivery.side_files import Tokens
from tasks.delivery.texts import PROBE_TOKENS
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.evaluation.vllm_jobs import HEADROOM
from tasks.pipeline.artifact import remember
from tasks.pipeline.stage import Mechanism, StageResult


@dataclass(frozen=True)
class Delivery:
    """A delivery that can be run: everything was found, and everything fits.

    Attributes:
        settings: the configuration.
        runs: `paths.runs`.
        given: SOURCE; the first where there are several adapters.
        adapters: the adapters, where SOURCE is one or there are several.
        base: folder of the base; None where none is needed.
        out: OUT.
        work: the plans.
        tokens: tokenizer and generation settings of what is served.
        choice: the base that an adapter is merged into, and what decided it.
        attention: what transformers is measured with, by its name there.
        reports: the audits of SOURCE, or of each adapter.
        warnings: what could not be told.
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
        """What serves the model for the smoke test; None where nothing does."""
        name = self.settings["smoke"]["engine"]
        return None if name == "none" else str(name)

    @property
    def store(self) -> Path:
        """Where artifacts are published."""
        return self.runs / "artifacts"

    @property
    def quantization(self) -> dict[str, Any] | None:
        """4 bits that training took the base through; None for none."""
        return self.choice.quantization

    @property
    def probe_tokens(self) -> int:
        """Tokens of a text that fit into the model's context, and into what vLLM is given."""
        config, settings = self.work.config, self.settings["smoke"]
        text = config.get("text_config") or config
        context = text.get("max_position_embeddings") or text.get("n_positions") or PROBE_TOKENS * 2
        room = settings["max_model_len"] or context - HEADROOM
        return max(SHORTEST, min(PROBE_TOKENS, room - settings["greedy_tokens"]))

    @property
    def inputs(self) -> tuple[Path, ...]:
        """Folders whose files end up in what is delivered."""
        roots = [self.given.root, *(one.given.root for one in self.adapters), self.tokens.folder]
        return tuple(dict.fromkeys([*roots, *([self.base] if self.base is not None else [])]))

    def run(self, mechanism: Mechanism, scorer: ReferenceScorer | None) -> StageResult:
        """Run the stages that apply; `put` comes after. Returns convert's result.

        Args:
            mechanism: runs the stages, or only looks at their keys.
            scorer: the transformers child; None where nothing is measured.
        """
        return Steps(self, mechanism, scorer).to_served()

    def compare(self, scorer: ReferenceScorer) -> Iterator[str]:
        """Measure both merges, for `merge.base=compare`."""
        assert self.base is not None
        assert self.quantization is not None
        weights = weights_of(self.adapters)
        roots = {role(index): one.given.root for index, one in enumerate(self.adapters)}
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

    def put(self, served: StageResult, mechanism: Mechanism) -> None:
        """Make OUT the served artifact."""
        put(served.artifact, self.out)
        for result in mechanism.results:  # a further link changes a file's ctime
            remember(result.artifact, self.store / ".seen")

    def lines(self) -> Iterator[str]:
        """What was recognised, and what of it is going where."""
        weights = weights_of(self.adapters).values()
        for one, weight in zip(self.adapters, weights, strict=False):
            yield f"adapter: {weight:g} x {one.given.line()}"
        if not weights:
            yield f"source: {self.given.line()}"
        if self.base is not None:
            yield f"base: {self.base}"
        yield f"out: {self.out}"
        if self.work.merge is not None:
            bits = f", {self.quantization['type']}" if self.quantization is not None else ""
            yield f"merge into: the {self.choice.mode} base{bits} ({self.choice.reason})"
        if self.settings["convert"]["quantize"] != "none":
            yield f"quantize: linear layers to {self.settings['convert']['quantize']}, by convert"
        yield f"smoke test: {self.engine or 'none'}"
        yield from examination.lines(self.reports)
        yield from (f"warning: {one}" for one in self.warnings)

    def plan_lines(self) -> Iterator[str]:
        """The weights plans in short."""
        for name, plan in (("gather", self.work.gather), ("merge", self.work.merge)):
            if plan is not None:
                yield f"  {name}: " + "; ".join(describe_plan(plan))
        if self.work.converts:
            yield "  convert: " + "; ".join(describe_plan(self.work.model))
        yield f"  served: {len(self.work.model.ops)} tensors, {megabytes(self.work.model.nbytes)}"
