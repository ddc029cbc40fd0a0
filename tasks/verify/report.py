"""The report of verify: its checks, its verdict, and both for people and programs.

The verdict is "verified" if no check found a fault, the served distribution is that of the trained
model, and it is not as near to that of the base; "fault" if a check found one; else "unverified".
What the server's API could not prove is named in every form of the report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tasks.core import report
from tasks.core.report import Cause, Row

DECISIVE = "distribution"
"""Check without which nothing is verified."""
ADAPTER = "adapter"
"""Check without which a model is not told from its base."""

Outcome = Literal["verified", "fault", "unverified"]
EXIT_STATUS: Mapping[Outcome, int] = {"verified": 0, "fault": 1, "unverified": 2}


@dataclass(frozen=True)
class Report:
    """Result of one verification.

    Attributes:
        url: address of the server, without a password.
        server: its dialect and version.
        model: name of the model that was checked.
        base: name of its base on the server; None without an adapter.
        source: folder of the reference.
        reference: one line about the reference.
    """

    url: str
    server: str
    model: str
    base: str | None
    source: str
    reference: str
    profile: str
    checks: tuple[Row, ...]
    seconds: float

    @property
    def outcome(self) -> Outcome:
        """The verdict; see the module docstring."""
        if report.faults(self.checks):
            return "fault"
        decisive = [check.verdict for check in self.checks if check.code == DECISIVE]
        return "verified" if decisive == ["ok"] and not self.undecided else "unverified"

    @property
    def undecided(self) -> bool:
        """True if the answers were compared with base and trained model, and could be of either."""
        adapter = (check for check in self.checks if check.code == ADAPTER)
        return any(check.verdict == "unknown" and check.measured for check in adapter)

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Likely causes over all checks, each code once, in the order of the checks."""
        return tuple(report.causes(self.checks))

    @property
    def unproven(self) -> tuple[str, ...]:
        """Names of the checks that the server's API could not answer."""
        return tuple(check.code for check in self.checks if check.verdict == "unknown")

    @property
    def line(self) -> str:
        """The verdict in one line, with what could not be proven."""
        who = f"{self.model} at {self.url}"
        if self.outcome == "fault":
            names = ", ".join(row.code for row in report.faults(self.checks))
            codes = ", ".join(cause.code for cause in self.causes)
            text = f"FAULT: {who} is not what was trained ({names}{f': {codes}' if codes else ''})"
        elif self.outcome == "verified":
            text = f"verified: {who} is the model of {self.source}"
        elif self.undecided:
            text = f"NOT VERIFIED: {who} may be {self.source} or its base: see {ADAPTER}"
        else:
            text = f"NOT VERIFIED: {who} could not be compared with {self.source}"
        return f"{text}; not proven: {', '.join(self.unproven)}" if self.unproven else text

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        names = ("url", "server", "model", "base", "source", "reference", "profile")
        return {
            "verdict": self.outcome,
            "line": self.line,
            **{name: getattr(self, name) for name in names},
            "seconds": round(self.seconds, 3),
            "causes": [cause.code for cause in self.causes],
            "unproven": list(self.unproven),
            "checks": [_as_json(check) for check in self.checks],
        }

    def text(self) -> str:
        """Return the report for a terminal: the checks as a table, faults first, the verdict."""
        about = f"{self.url} ({self.server}): {self.model}"
        about += f", base {self.base}" if self.base else ""
        reference = f"reference: {self.source} ({self.reference}), profile {self.profile}"
        last = f"{self.line}; {self.seconds:.1f} s"
        return report.folded([about, reference, "", *report.table(self.checks), last])

    def junit(self) -> str:
        """Return the report as JUnit XML; "unverified" is an error."""
        error = self.line if self.outcome == "unverified" else ""
        group = f"verify.{self.model}"
        return report.junit("plumbline verify", group, self.checks, self.seconds, error)

    def markdown(self) -> str:
        """Return the report as Markdown for pages of orchestrators and trackers."""
        return report.markdown(self.line, self.checks)


def _as_json(check: Row) -> dict[str, Any]:
    fields = {"name": check.code, "verdict": check.verdict, "text": check.text}
    numbers = {"measured": dict(check.measured), "limit": dict(check.limit)}
    return {**fields, **numbers, "causes": [asdict(cause) for cause in check.causes]}
