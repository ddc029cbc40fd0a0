"""The report of a verification: its verdict, and its forms for people and for programs.

The verdict is "verified" if no check found a fault, the served distribution is that of the trained
model, and it is not as near to that of the base; "fault" if a check found one; else "unverified".
What the server's API could not prove is named in every form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import wrap
from typing import Any, Literal
from xml.etree import ElementTree

from tasks.core.terminal import plain

WIDTH, NAMES = 100, 15
"""Characters of a line, and of the column of checks."""
DECISIVE = "distribution"
"""Check without which nothing is verified."""
Outcome = Literal["verified", "fault", "unverified"]
EXIT_STATUS: Mapping[Outcome, int] = {"verified": 0, "fault": 1, "unverified": 2}


@dataclass(frozen=True)
class Cause:
    """Likely cause of a fault: its code, the numbers that speak for it, and what to type."""

    code: str
    text: str
    hint: str


@dataclass(frozen=True)
class Row:
    """Verdict of one check."""

    code: str  # name of the check
    verdict: Literal["ok", "fault", "unknown"]  # unknown: nothing was proven; never counts as ok
    text: str  # one sentence for a person
    measured: Mapping[str, float | str] = field(default_factory=dict)  # numbers and names by key
    causes: Sequence[Cause] = ()  # likely causes of a fault, the likeliest first
    limit: Mapping[str, float] = field(default_factory=dict)  # of numbers, by the same key


@dataclass(frozen=True)
class Report:
    """Result of one verification."""

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
        return [check for check in self.checks if check.verdict == "fault"]

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
        return {
            "verdict": self.outcome,
            "line": self.line,
            **vars(self),
            "causes": [cause.code for cause in self.causes],
            "unproven": list(self.unproven),
            "checks": checks,
        }

    def text(self) -> str:
        """Return the report for a terminal: the checks as a table, faults first, the verdict."""
        about = f"{self.url} ({self.server}): {self.model}"
        about += f", base {self.base}" if self.base else ""
        reference = f"reference: {self.source} ({self.reference}), profile {self.profile}"
        lines = [*_folded(about), *_folded(reference), ""]
        lines += [f"{'check':<{NAMES}} {'verdict':<8} measured", "-" * WIDTH]
        explained: set[str] = set()
        for check in sorted(self.checks, key=lambda check: check.verdict != "fault"):
            word = "FAULT" if check.verdict == "fault" else check.verdict
            first = f"{check.code:<{NAMES}} {word:<8} "
            for line in _details(check, explained):
                lines += _folded(line, first, " " * (NAMES + 10))
                first = " " * (NAMES + 10)
        lines += ["-" * WIDTH, *_folded(f"{self.line}; {self.seconds:.1f} s")]
        return plain("\n".join(lines))

    def markdown(self) -> str:
        """Return the report for pages of orchestrators and trackers: its text, as code."""
        return f"```text\n{self.text().replace('```', chr(39) * 3)}\n```\n"

    def junit(self) -> str:
        """Return JUnit XML: one test case for each check, "unknown" as skipped.

        "unverified" is an error: a program that counts failures must not take it for a success.
        """
        is_error = self.outcome == "unverified"
        counts = {
            "tests": len(self.checks) + is_error,
            "failures": len(self.faults),
            "errors": int(is_error),
            "skipped": len(self.unproven),
        }
        attributes = {"name": "plumbline verify", **{key: str(n) for key, n in counts.items()}}
        top = ElementTree.Element("testsuite", {**attributes, "time": f"{self.seconds:.3f}"})
        outcomes = [(check.code, check.verdict, check.text) for check in self.checks]
        details = {check.code: "\n".join(_details(check, set())) for check in self.faults}
        types = {
            check.code: ", ".join(cause.code for cause in check.causes) or check.code
            for check in self.faults
        }
        for name, verdict, text in [*outcomes, *([("verdict", "error", self.line)] * is_error)]:
            about = {"classname": plain(f"verify.{self.model}"), "name": plain(name)}
            case = ElementTree.SubElement(top, "testcase", about)
            kind = {"unknown": "skipped", "fault": "failure", "error": "error"}.get(verdict)
            if kind:
                about = {"message": plain(text)}
                if verdict == "fault":
                    about["type"] = types[name]
                result = ElementTree.SubElement(case, kind, about)
                result.text = plain(details.get(name, ""))
        ElementTree.indent(top)
        return ElementTree.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _folded(line: str, first: str = "", indent: str = "  ") -> list[str]:
    return wrap(line, WIDTH, initial_indent=first, subsequent_indent=indent, break_on_hyphens=False)


def _details(check: Row, explained: set[str]) -> Iterator[str]:
    """Yield the text, and the causes that are not `explained` yet with what to type."""
    yield check.text
    for cause in check.causes:
        if cause.code in explained:
            yield f"cause: as above [{cause.code}]"
            continue
        explained.add(cause.code)
        yield f"cause: {cause.text} [{cause.code}]"
        yield f"-> {cause.hint}"
