"""The chain of a delivery: what SOURCE is, what has to be done with it, and who reads what.

delivery = Delivery.prepare(composed)      # recognises, plans, validates; writes nothing
print(delivery.text())
delivery.run(mechanism, scorer)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.config import Composed
from flows.deliver_steps import Steps
from tasks.artifact import remember
from tasks.deliver.identity import base_findings, base_missing, find_base
from tasks.deliver.outlet import out_findings, put
from tasks.deliver.planning import prepare
from tasks.deliver.quantization import quantization_of, says_nothing
from tasks.deliver.recognise import Given, recognise
from tasks.deliver.side_files import Tokens, find_tokens
from tasks.deliver.stages import side_findings
from tasks.deliver.work import Request, Target, Work, describe_plan, megabytes
from tasks.errors import ConfigError, PlumblineError
from tasks.scoring import ReferenceScorer
from tasks.stage import Mechanism, StageResult
from tasks.weights.quantize import check_quantize
from tasks.weights.reader import check_dtype
from tasks.weights.worker import perform
from tasks.weights.writer import parse_size, require_space


@dataclass(frozen=True)
class Delivery:
    """A delivery that can be run: everything was found, and everything fits.

    Attributes:
        settings: the configuration.
        runs: `paths.runs`.
        given: SOURCE.
        base: folder of the base; None where none is needed.
        out: OUT.
        work: the plans.
        tokens: tokenizer and generation settings of what is served.
        quantization: 4 bits that training held the base in; None for none.
        warnings: what could not be told.
    """

    settings: dict[str, Any]
    runs: Path
    given: Given
    base: Path | None
    out: Path
    work: Work
    tokens: Tokens
    quantization: dict[str, Any] | None
    warnings: tuple[str, ...] = ()

    @classmethod
    def prepare(cls, composed: Composed) -> Delivery:
        """Look at SOURCE and base, plan, and check all that can be checked before the first byte.

        Raises:
            ConfigError: with everything that rules the delivery out. Nothing was started.
        """
        try:
            return _prepare(composed)
        except ConfigError:
            raise
        except PlumblineError as error:
            raise ConfigError(error.message, details=error.details, hint=error.hint) from error

    @property
    def engine(self) -> str | None:
        """What serves the model for the smoke test; None where nothing does."""
        name = self.settings["smoke"]["engine"]
        return None if name == "none" else str(name)

    @property
    def store(self) -> Path:
        """Where artifacts are published."""
        return self.runs / "artifacts"

    def run(self, mechanism: Mechanism, scorer: ReferenceScorer | None) -> StageResult:
        """Run the stages that apply; `put` comes after. Returns convert's result.

        Args:
            mechanism: runs the stages, or only looks at their keys.
            scorer: the transformers child; None where nothing is measured.
        """
        return Steps(self, mechanism, scorer).to_served()

    def put(self, served: StageResult, mechanism: Mechanism) -> None:
        """Make OUT the served artifact."""
        put(served.artifact, self.out)
        for result in mechanism.results:  # a further link changes a file's ctime
            remember(result.artifact, self.store / ".seen")

    def lines(self) -> Iterator[str]:
        """What was recognised, and what of it is going where."""
        yield f"source: {self.given.line()}"
        if self.base is not None:
            yield f"base: {self.base}"
        yield f"out: {self.out}"
        if self.quantization is not None:
            how = self.quantization["base"]
            yield f"4 bits: trained on {self.quantization['type']}, folded into the {how} base"
        elif self.work.merge is not None:
            unsaid = "; nothing says that training quantised it (QLoRA: merge.base=dequantized)"
            trust = says_nothing(self.given, self.settings["merge"])
            yield f"merge into: the base as it is{unsaid if trust else ''}"
        yield f"smoke test: {self.engine or 'none'}"
        yield from (f"warning: {one}" for one in self.warnings)

    def plan_lines(self) -> Iterator[str]:
        """The weights plans in short."""
        for name, plan in (("gather", self.work.gather), ("merge", self.work.merge)):
            if plan is not None:
                yield f"  {name}: " + "; ".join(describe_plan(plan))
        if self.work.converts:
            yield "  convert: " + "; ".join(describe_plan(self.work.model))
        yield f"  served: {len(self.work.model.ops)} tensors, {megabytes(self.work.model.nbytes)}"


def _prepare(composed: Composed) -> Delivery:
    settings = composed.settings
    target = Target(
        check_dtype(settings["convert"]["dtype"]), parse_size(settings["convert"]["max_shard_size"])
    )
    check_quantize(settings["convert"].get("quantize", "none"))
    given = recognise(Path(settings["source"]).expanduser().absolute())
    base = find_base(given, settings["base"], composed.runs / "artifacts")
    warnings = _check_base(given, base, composed)
    out = Path(settings["out"]).expanduser().absolute()
    inputs = [one for one in (given.root, base) if one is not None]
    findings = list(out_findings(out, inputs=inputs, expected=None, overwrite=True))
    if findings:
        raise ConfigError(findings[0], details=findings[1:], hint="out=<another folder>")
    quantization = quantization_of(given, base, settings["merge"], composed.runs / "artifacts")
    config = settings["adapter_config"]
    request = Request(
        given,
        base,
        target,
        quantization,
        Path(config).expanduser().absolute() if config else None,
        perform,
    )
    work = prepare(request)
    if settings["smoke"]["engine"] != "none" and not work.is_causal:
        names = ", ".join(work.config.get("architectures") or ["no class"])
        raise ConfigError(
            f"smoke.engine={settings['smoke']['engine']}: only causal language models are measured "
            f"here, this is {names}",
            hint="smoke.engine=none",
        )
    tokens = find_tokens(_token_folders(given, base))
    if work.converts:
        base = None  # named for its tokenizer alone
    _refuse_misfits(work, tokens)
    for folder in {_existing(composed.runs), _existing(out)}:
        require_space(folder, work.model.nbytes)
    return Delivery(settings, composed.runs, given, base, out, work, tokens, quantization, warnings)


def _check_base(given: Given, base: Path | None, composed: Composed) -> tuple[str, ...]:
    """Refuse a base that is recorded as another one; say where nothing can tell."""
    if base is None:
        if given.kind == "adapter":
            raise base_missing(given)
        return ()
    findings = list(base_findings(given, base, composed.runs / "artifacts"))
    if not findings:
        return ()
    if composed.settings["check_base"]:
        raise ConfigError(
            f"wrong base: {findings[0]}",
            details=findings[1:],
            hint="base=<the base that was trained>; check_base=false takes this one all the same",
        )
    return tuple(findings)


def _token_folders(given: Given, base: Path | None) -> list[Path]:
    """Where a tokenizer may be, the most telling place first."""
    inside = [given.root / "tokenizer"] if given.kind == "shards" else []
    above = [given.root.parent] if given.kind == "deepspeed" else []
    return [*inside, given.root, *above, *([base] if base is not None else [])]


def _refuse_misfits(work: Work, tokens: Tokens) -> None:
    findings = list(side_findings(work, tokens))
    if findings:
        raise ConfigError(f"tokenizer and model do not fit: {findings[0]}", details=findings[1:])


def _existing(path: Path) -> Path:
    return next(one for one in (path, *path.parents) if one.is_dir())
