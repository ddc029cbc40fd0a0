"""The result of a bisection: verdict, text for the terminal, JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from tasks.core import report
from tasks.core.report import Cause, Page, Row
from tasks.core.terminal import command

SHOWN = 10
"""Rows of a table."""
AUDIT = f"read every byte of b: {command('audit', source='<b>', base='<a>', values=True)}"
_DELIVER = command("deliver", source="<source>", out="<folder>")
REDO = f"make b's folder again from its source: {_DELIVER}"
MERGE = f"merge it: {command('deliver', source='<adapter>', base='<folder>', out='<folder>')}"

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

    def row(self, verdict: str) -> Row:
        """Return it as a row of the report."""
        details = []
        if self.distance:
            name = "arriving input" if self.where == "input" else "output for the same input"
            details.append(f"{name}: {self.distance:.2%} off, noise {self.noise:.2%}")
        elif self.where == "weights":
            details.append("no probe shows it: an expert or a token that the probes do not use")
        details += [gap.line for gap in self.tensors]
        causes = [Cause("", self.cause, self.hint)] if self.cause else []
        return Row(self.module, verdict, _WHERE[self.where], causes=causes, details=details)


@dataclass(frozen=True)
class Report(report.Report):
    """The result of a bisection."""

    command = "bisect"
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

    def summary(self) -> str:
        """Return one line for the details of another error."""
        if not self.divergences or self.verdict != "differs":
            return f"bisect: {self.line}"
        first = self.divergences[0]
        return f"bisect: they part at {first.module} ({_WHERE[first.where]}): {first.cause}"

    @property
    def line(self) -> str:
        """The verdict and its reason."""
        return VERDICTS[self.verdict] + (f": {self.reason}" if self.reason else "")

    def page(self) -> Page:
        """Return the first divergence with details, and the next ones."""
        engine = f" in {self.engine}" if self.engine != "transformers" else ""
        head, tail = [f"a: {self.a}", f"b: {self.b}{engine}"], []
        if self.drift is not None:
            numbers = ", ".join(f"{key} {value:.3g}" for key, value in self.drift.items())
            head += [f"whole model: {numbers}", f"  {self.limit or 'within the profile'}"]
        head += [f"note: {note}" for note in self.notes]
        verdict = "differs" if self.verdict == "differs" else "below"
        rows = [each.row(verdict) for each in self.divergences[:SHOWN]]
        rows[1:] = [replace(row, details=()) for row in rows[1:]]
        if rows:
            count = f"modules that differ: {len(self.divergences)}"
            tail.append(f"{count}; that agree before: {self.agreeing} of {self.modules}")
        lines = [f"  {line}" for line in self.config[:SHOWN]]
        tail += ["config.json differs:", *lines] if lines else []
        return Page(head, rows, self.line, tail, proves=self.verdict != "refused")
