"""The report of a verification: its verdict, and its forms for people and for programs.

The verdict is "verified" if no check found a fault, the served distribution is that of the trained
model, and it is not as near to that of the base; "fault" if a check found one; else "unverified".
What the server's API could not prove is named in every form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from tasks.core import report
from tasks.core.report import Cause, Page, Row

DECISIVE = "distribution"
"""Check without which nothing is verified."""
Outcome = Literal["verified", "fault", "unverified"]
EXIT_STATUS: Mapping[Outcome, int] = {"verified": 0, "fault": 1, "unverified": 2}


@dataclass(frozen=True)
class Report(report.Report):
    """Result of one verification."""

    command = "verify"
    url: str  # without a password
    server: str  # dialect and version
    model: str
    base: str | None  # its name on the server; None without an adapter
    source: str  # folder of the reference
    reference: str  # one line about it
    profile: str
    checks: tuple[Row, ...]
    seconds: float

    @property
    def faults(self) -> list[Row]:
        """Checks that found a fault."""
        return [check for check in self.checks if check.failed]

    @property
    def outcome(self) -> Outcome:
        """The verdict; see the module docstring."""
        if self.faults:
            return "fault"
        decisive = [check.verdict for check in self.checks if check.code == DECISIVE]
        return "verified" if decisive == ["ok"] and not self.undecided else "unverified"

    @property
    def undecided(self) -> bool:
        """True if the answers were compared with base and trained model, and could be of either."""
        return any(
            check.code == "adapter" and check.verdict == "unknown" and check.measured
            for check in self.checks
        )

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Likely causes over all checks, each code once, in the order of the checks."""
        by_code: dict[str, Cause] = {}
        for cause in (cause for check in self.faults for cause in check.causes):
            by_code.setdefault(cause.code, cause)
        return tuple(by_code.values())

    @property
    def unproven(self) -> tuple[str, ...]:
        """Names of the checks that the server's API could not answer."""
        return tuple(check.code for check in self.checks if check.verdict == "unknown")

    @property
    def line(self) -> str:
        """The verdict in one line, with what could not be proven."""
        who = f"{self.model} at {self.url}"
        if self.outcome == "fault":
            names = ", ".join(check.code for check in self.faults)
            codes = ", ".join(cause.code for cause in self.causes)
            text = f"FAULT: {who} is not what was trained ({names}{f': {codes}' if codes else ''})"
        elif self.outcome == "verified":
            text = f"verified: {who} is the model of {self.source}"
        elif self.undecided:
            text = f"NOT VERIFIED: {who} may be {self.source} or its base: see adapter"
        else:
            text = f"NOT VERIFIED: {who} could not be compared with {self.source}"
        return f"{text}; not proven: {', '.join(self.unproven)}" if self.unproven else text

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        checks = [asdict(check) for check in self.checks]
        for check in checks:
            check["name"] = check.pop("code")
            del check["details"]
        return {
            "verdict": self.outcome,
            "line": self.line,
            **vars(self),
            "causes": [cause.code for cause in self.causes],
            "unproven": list(self.unproven),
            "checks": checks,
        }

    def page(self) -> Page:
        """Return the checks, faults first."""
        about = f"{self.url} ({self.server}): {self.model}"
        about += f", base {self.base}" if self.base else ""
        reference = f"reference: {self.source} ({self.reference}), profile {self.profile}"
        line, proves = f"{self.line}; {self.seconds:.1f} s", self.outcome != "unverified"
        subject = self.model or self.source
        return Page(
            [about, reference], self.checks, line, proves=proves, subject=subject,
            seconds=self.seconds,
        )  # fmt: skip
