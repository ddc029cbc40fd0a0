"""The result of a bisection: verdict, text for the terminal, JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tasks.core.terminal import plain

SHOWN = 10
"""Rows of a table."""
AUDIT = "audit b against a"
"""Replaced by the command, with the folders (`run.py`)."""
REDO = "make b's folder again from its source: python flows/deliver.py <source> out=<folder>"

VERDICTS = {
    "same": "no difference: both compute the same",
    "noise": "no difference above noise",
    "rounding": "noise-like in every layer: rounding, no layer stands out",
    "below": "no difference above the gate",
    "differs": "they part",
    "refused": "they cannot be compared",
}


@dataclass(frozen=True)
class Divergence:
    """A module in which the two models part.

    Attributes:
        module: name of the module.
        where: `weights`, `output` (same input, other output) or `input` (the code before it).
        distance: relative distance of its output, or input, from a's; 0 if no probe reaches it.
        noise: the same between two runs of one model.
        tensors: comparisons of its tensors that differ.
        cause: the likely cause.
        hint: what to type.
    """

    module: str
    where: str
    distance: float
    noise: float
    tensors: list[dict[str, Any]] = field(default_factory=list)
    cause: str = ""
    hint: str = ""

    def lines(self) -> Iterator[str]:
        """Yield the lines of the terminal's text."""
        yield f"{self.module} ({_WHERE[self.where]})"
        if self.distance:
            name = "arriving input" if self.where == "input" else "output for the same input"
            yield f"  {name}: {self.distance:.2%} off, noise {self.noise:.2%}"
        elif self.where == "weights":
            yield "  no probe shows it: an expert or a token that the probes do not use"
        for gap in self.tensors:
            name = f"{gap['name']} {gap['shape']}"
            if gap["problem"]:
                yield f"  {name}: {gap['problem']}"
            else:
                yield (
                    f"  {name}: max difference {gap['max_difference']:.3g}, "
                    f"{gap['relative']:.2%} of its length, {gap['share']:.1%} of the elements"
                )
        if self.cause:
            yield f"  likely cause: {self.cause}"
        if self.hint:
            yield f"  -> {self.hint}"


_WHERE = {
    "weights": "its weights",
    "output": "same weights, other output",
    "input": "the code before it: attention, rotary embedding, residual",
}


@dataclass(frozen=True)
class Report:
    """The result of a bisection.

    Attributes:
        a: the first model, as text.
        b: the second model.
        verdict: a key of `VERDICTS`.
        reason: one sentence for the verdict.
        modules: number of compared modules.
        agreeing: number of modules, in order, before the first difference.
        divergences: modules in which they part, in the order of execution.
        drift: drift of b from a as `fingerprint.Drift`, or of their scores; None if not measured.
        limit: what the drift exceeds, in words; "" if it is within the profile.
        config: differing keys of config.json.
        notes: facts that change no verdict.
        engine: engine of b.
    """

    a: str
    b: str
    verdict: str
    reason: str = ""
    modules: int = 0
    agreeing: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    drift: Mapping[str, float] | None = None
    limit: str = ""
    config: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    engine: str = "transformers"

    @property
    def exit_status(self) -> int:
        """0 for no difference, 1 for a difference, 2 if the two cannot be compared."""
        return {"differs": 1, "refused": 2}.get(self.verdict, 0)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON, with `first` as the first divergence."""
        first = asdict(self.divergences[0]) if self.divergences else None
        return {**asdict(self), "first": first, "exit_status": self.exit_status}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Report:
        """Return the report of a document that `as_json` made."""
        fields = {k: v for k, v in document.items() if k not in ("first", "exit_status")}
        rows = [Divergence(**row) for row in fields.pop("divergences")]
        return cls(**fields, divergences=rows)

    def text(self) -> str:
        """Return the report as text for the terminal."""
        return plain("\n".join(self._lines()))

    def summary(self) -> str:
        """Return one line for the details of another error."""
        if not self.divergences or self.verdict != "differs":
            return f"bisect: {VERDICTS[self.verdict]}" + (f": {self.reason}" if self.reason else "")
        first = self.divergences[0]
        return f"bisect: they part at {first.module} ({_WHERE[first.where]}): {first.cause}"

    def _lines(self) -> Iterator[str]:
        yield f"a: {self.a}"
        yield f"b: {self.b}" + (f" in {self.engine}" if self.engine != "transformers" else "")
        if self.drift is not None:
            numbers = ", ".join(f"{key} {value:.3g}" for key, value in self.drift.items())
            yield f"whole model: {numbers}"
            yield f"  {self.limit or 'within the profile'}"
        yield from (f"note: {note}" for note in self.notes)
        yield ""
        yield VERDICTS[self.verdict] + (f": {self.reason}" if self.reason else "")
        if self.divergences:
            yield f"modules that agree before it: {self.agreeing} of {self.modules}"
            yield from (f"  {line}" for line in self.divergences[0].lines())
            rest = self.divergences[1 : 1 + SHOWN]
            if rest:
                yield f"further modules that differ: {len(self.divergences) - 1}"
                yield from (f"  {row.module}: {_short(row)}" for row in rest)
        if self.config:
            yield "config.json differs:"
            yield from (f"  {line}" for line in self.config[:SHOWN])


def _short(row: Divergence) -> str:
    return f"{row.where}, {row.distance:.2%} off" + (f"; {row.cause}" if row.cause else "")
