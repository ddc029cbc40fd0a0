"""The result of a bisection: verdict, text for the terminal, JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tasks.core.terminal import plain

SHOWN = 10
"""Rows of a table."""
AUDIT = "read every byte of b: python flows/audit.py source=<b> base=<a> values=true"
REDO = "make b's folder again from its source: python flows/deliver.py <source> out=<folder>"

VERDICTS = {
    "same": "no difference: both compute the same",
    "noise": "no difference above noise",
    "rounding": "noise-like in every layer: rounding, no layer stands out",
    "below": "no difference above the gate",
    "differs": "they part",
    "refused": "they cannot be compared",
}
_WHERE = {
    "weights": "its weights",
    "output": "same weights, other output",
    "input": "the code before it: attention, rotary embedding, residual",
}


@dataclass(frozen=True)
class TensorGap:
    """Comparison of one tensor of a with that of b."""

    name: str
    shape: tuple[int, ...]  # in a
    max_difference: float = 0.0  # absolute
    relative: float = 0.0  # length of the difference relative to that of a's tensor
    share: float = 0.0  # share of the elements that differ
    rounding: str = ""  # format that explains all differences; "" if none does
    problem: str = ""  # why the two cannot be compared; "" if they can

    @property
    def different(self) -> bool:
        """True if the two differ, and rounding does not explain it."""
        return bool(self.problem) or (self.share > 0 and not self.rounding)

    @property
    def line(self) -> str:
        """The comparison for a person."""
        text = self.problem or (
            f"max difference {self.max_difference:.3g}, {self.relative:.2%} of its length, "
            f"{self.share:.1%} of the elements"
        )
        return f"{self.name} {list(self.shape)}: {text}"


@dataclass(frozen=True)
class Divergence:
    """A module in which the two models part."""

    module: str
    where: str  # a key of `_WHERE`: "output" is same input, other output
    distance: float  # relative, of its output, or input, from a's; 0 if no probe reaches it
    noise: float  # the same between two runs of one model
    tensors: list[TensorGap] = field(default_factory=list)  # those that differ
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
        yield from (f"  {gap.line}" for gap in self.tensors)
        if self.cause:
            yield f"  likely cause: {self.cause}"
        if self.hint:
            yield f"  -> {self.hint}"


@dataclass(frozen=True)
class Report:
    """The result of a bisection."""

    a: str
    b: str
    verdict: str  # a key of `VERDICTS`
    reason: str = ""
    modules: int = 0  # number of compared modules
    agreeing: int = 0  # modules, in order of execution, before the first difference
    divergences: list[Divergence] = field(default_factory=list)  # in the order of execution
    drift: Mapping[str, float] | None = None  # of b from a, or of their scores
    limit: str = ""  # what the drift exceeds; "" if it is within the profile
    config: list[str] = field(default_factory=list)  # differing keys of config.json
    notes: list[str] = field(default_factory=list)  # modules that only one of the two has
    engine: str = "transformers"  # of b

    @property
    def exit_status(self) -> int:
        """0 for no difference, 1 for a difference, 2 if the two cannot be compared."""
        return {"differs": 1, "refused": 2}.get(self.verdict, 0)

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON, with `first` as the first divergence."""
        first = asdict(self.divergences[0]) if self.divergences else None
        return {**asdict(self), "first": first, "exit_status": self.exit_status}

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
            if rest := self.divergences[1:]:
                yield f"further modules that differ: {len(rest)}"
                yield from (f"  {row.module}: {row.where}; {row.cause}" for row in rest[:SHOWN])
        if self.config:
            yield "config.json differs:"
            yield from (f"  {line}" for line in self.config[:SHOWN])
