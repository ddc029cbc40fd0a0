"""The report of verify: all checks, the verdict, and their texts for people and programs.

The verdict is "verified" if no check found a fault, the served distribution is that of the trained
model, and it is not as near to that of the base; "fault" if a check found one; else "unverified".
What the server's API could not prove is named in every form of the report.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from textwrap import wrap
from typing import Any, Literal
from xml.etree import ElementTree

from tasks.core.terminal import plain
from tasks.verify.check import Cause, Check

DECISIVE = "distribution"
"""Check without which nothing is verified."""
ADAPTER = "adapter"
"""Check without which a model is not told from its base."""
WIDTH = 100
_INDENT = 25
_WORDS = {"ok": "ok", "fault": "FAULT", "unknown": "unknown"}

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
        profile: drift profile of the limits.
        checks: in their order.
        seconds: wall-clock time.
    """

    url: str
    server: str
    model: str
    base: str | None
    source: str
    reference: str
    profile: str
    checks: tuple[Check, ...]
    seconds: float

    @property
    def outcome(self) -> Outcome:
        """The verdict; see the module docstring."""
        if any(check.verdict == "fault" for check in self.checks):
            return "fault"
        decisive = [check.verdict for check in self.checks if check.name == DECISIVE]
        return "verified" if decisive == ["ok"] and not self.undecided else "unverified"

    @property
    def undecided(self) -> bool:
        """True if the answers were compared with base and trained model, and could be of either."""
        adapter = (check for check in self.checks if check.name == ADAPTER)
        return any(check.verdict == "unknown" and check.measured for check in adapter)

    @property
    def faults(self) -> tuple[Check, ...]:
        """The checks that found a fault."""
        return tuple(check for check in self.checks if check.verdict == "fault")

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Likely causes over all checks, each code once, in the order of the checks."""
        causes = {cause.code: cause for check in reversed(self.faults) for cause in check.causes}
        order = [cause.code for check in self.faults for cause in check.causes]
        return tuple(causes[code] for code in dict.fromkeys(order))

    @property
    def unproven(self) -> tuple[str, ...]:
        """Names of the checks that the server's API could not answer."""
        return tuple(check.name for check in self.checks if check.verdict == "unknown")

    @property
    def line(self) -> str:
        """The verdict in one line, with what could not be proven."""
        who = f"{self.model} at {self.url}"
        if self.outcome == "fault":
            names = ", ".join(check.name for check in self.faults)
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
        return {
            "verdict": self.outcome,
            "line": self.line,
            **{name: value for name, value in asdict(self).items() if name != "checks"},
            "seconds": round(self.seconds, 3),
            "causes": [cause.code for cause in self.causes],
            "unproven": list(self.unproven),
            "checks": [asdict(check) for check in self.checks],
        }

    def text(self) -> str:
        """Return the report for a terminal: the checks as a table, faults first, then the verdict.

        A cause that several checks have is explained once.
        """
        listed = [*self.faults, *(check for check in self.checks if check not in self.faults)]
        explained: set[str] = set()
        about = f"{self.url} ({self.server}): {self.model}"
        about += f", base {self.base}" if self.base else ""
        lines = [
            about,
            f"reference: {self.source} ({self.reference}), profile {self.profile}",
            "",
            f"{'check':<15} {'verdict':<8} measured",
            "-" * WIDTH,
            *(line for check in listed for line in _rows(check, explained)),
            "-" * WIDTH,
            f"{self.line}; {self.seconds:.1f} s",
        ]
        folded = (wrap(line, WIDTH, subsequent_indent="  ", **_WRAP) or [""] for line in lines)
        return plain("\n".join(part for parts in folded for part in parts))

    def junit(self) -> str:
        """Return the report as JUnit XML: one test case for each check, "unknown" as skipped."""
        counts = {"tests": len(self.checks), "failures": len(self.faults)}
        suite = ElementTree.Element(
            "testsuite",
            {
                "name": "plumbline verify",
                **{name: str(count) for name, count in counts.items()},
                "errors": "0",
                "skipped": str(len(self.unproven)),
                "time": f"{self.seconds:.3f}",
            },
        )
        for check in self.checks:
            names = {"classname": plain(f"verify.{self.model}"), "name": check.name}
            case = ElementTree.SubElement(
                suite, "testcase", {key: plain(v) for key, v in names.items()}
            )
            if check.verdict == "unknown":
                ElementTree.SubElement(case, "skipped", {"message": plain(check.text)})
            if check.verdict == "fault":
                codes = ", ".join(cause.code for cause in check.causes)
                attributes = {"message": plain(check.text), "type": codes or check.name}
                failure = ElementTree.SubElement(case, "failure", attributes)
                failure.text = plain("\n".join(_details(check, set())))
        if self.outcome == "unverified":
            suite.set("errors", "1")
            suite.set("tests", str(len(self.checks) + 1))
            case = ElementTree.SubElement(
                suite, "testcase", {"classname": "verify", "name": "verdict"}
            )
            ElementTree.SubElement(case, "error", {"message": plain(self.line)})
        ElementTree.indent(suite)
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"

    def markdown(self) -> str:
        """Return the report as Markdown for pages of orchestrators and trackers."""
        lines = [
            _cell(self.line),
            "",
            "| check | verdict | measured | cause |",
            "|---|---|---|---|",
        ]
        for check in self.checks:
            codes = ", ".join(cause.code for cause in check.causes)
            lines.append(
                f"| {check.name} | {_WORDS[check.verdict]} | {_cell(check.text)} | {codes} |"
            )
        for cause in self.causes:
            lines += ["", f"{cause.code}: {_cell(cause.text)}", f"- fix: {_cell(cause.hint)}"]
        return "\n".join(lines) + "\n"


_WRAP: Mapping[str, Any] = {"break_on_hyphens": False}


def _rows(check: Check, explained: set[str]) -> Iterator[str]:
    """Yield the lines of one check, none wider than `WIDTH`.

    Args:
        check: the check.
        explained: codes of the causes that need no explanation any more; grows.
    """
    first = f"{check.name:<15} {_WORDS[check.verdict]:<8} "
    for line in _details(check, explained):
        yield from wrap(line, WIDTH, initial_indent=first, subsequent_indent=" " * _INDENT, **_WRAP)
        first = " " * _INDENT


def _details(check: Check, explained: set[str]) -> Iterator[str]:
    """Yield what was measured against its limits, the likely causes, and what to type."""
    limits = ", ".join(
        f"{name.replace('_', ' ')}: {_number(check.measured[name])} (limit {_number(limit)})"
        for name, limit in check.limit.items()
        if name in check.measured
    )
    yield check.text
    if limits:
        yield limits
    for cause in check.causes:
        if cause.code in explained:
            yield f"cause: as above [{cause.code}]"
            continue
        explained.add(cause.code)
        yield f"cause: {cause.text} [{cause.code}]"
        yield f"-> {cause.hint}"


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.3g}"


def _cell(text: str) -> str:
    """Return text that may come from a server for a cell of a Markdown table, as code."""
    return f"`{plain(text).replace('`', chr(39)).replace('|', '/')}`"
