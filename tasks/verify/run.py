"""Run all checks of a running server, one after the other.

target = choose(server.models(), source, model=None, base=None)     names on the server
report = verify(server, target, reference, "standard")

The verdict is "verified" if no check found a fault, the served distribution is that of the trained
model, and it is not as near to that of the base; "fault" if a check found one; else "unverified".
What the server's API could not prove is named in every form of the report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tasks.core import report
from tasks.core.errors import ConfigError, PlumblineError
from tasks.core.report import Cause, Row
from tasks.verify.asked import Asked
from tasks.verify.checks import CHECKS
from tasks.verify.reference import Reference
from tasks.verify.servers.server import ServedModel, Server

DECISIVE = "distribution"
"""Check without which nothing is verified."""

Outcome = Literal["verified", "fault", "unverified"]
EXIT_STATUS: Mapping[Outcome, int] = {"verified": 0, "fault": 1, "unverified": 2}


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
    def outcome(self) -> Outcome:
        """The verdict; see the module docstring."""
        if report.faults(self.checks):
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
            text = f"NOT VERIFIED: {who} may be {self.source} or its base: see adapter"
        else:
            text = f"NOT VERIFIED: {who} could not be compared with {self.source}"
        return f"{text}; not proven: {', '.join(self.unproven)}" if self.unproven else text

    def as_json(self) -> dict[str, Any]:
        """Return the report for programs."""
        return {
            "verdict": self.outcome,
            "line": self.line,
            **vars(self),
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


@dataclass(frozen=True)
class Target:
    """Names on the server: the model to check, and its base; None if the server says none."""

    model: str
    base: str | None


def choose(
    served: Sequence[ServedModel], source: Path, *, model: str | None, base: str | None
) -> Target:
    """Return the names of the model and of its base, as far as the user has not chosen them.

    The model is the only one, or the one that was loaded from `source`; the base is the parent that
    the server names. Raises ConfigError, with a line for each name that is not clear.
    """
    by_name = {entry.name: entry for entry in served}
    names = ", ".join(by_name) or "none"
    problems = [
        f"{key}={name}: the server has no such model; it has {names} -> {key}=<one of them>"
        for key, name in (("name", model), ("base", base))
        if name is not None and name not in by_name
    ]
    if model is None:
        loaded = [
            name
            for name, entry in by_name.items()
            if (entry.root or "").startswith("/")
            and Path(entry.root or "").resolve() == source.resolve()
        ]
        candidates = loaded or list(by_name)
        if len(candidates) == 1:
            model = candidates[0]
        else:
            problems.append(f"model: the server has {names} -> name=<the one of {source}>")
    if problems or model is None:
        raise ConfigError("the model to verify is not clear", details=problems)
    parent = by_name[model].parent
    return Target(model, base or (parent if parent in by_name else None))


def verify(
    server: Server,
    target: Target,
    reference: Reference,
    profile: str,
    *,
    only: Sequence[str] = (),
) -> Report:
    """Run all checks, or `only` some; nothing that goes wrong on the server is raised.

    `profile` is a key of `tasks.drift.fingerprint.PROFILES`.
    """
    began = time.perf_counter()
    checks = run_checks(Asked(server, target.model, target.base, reference, profile), only)
    step = reference.facts.get("step")
    about = f"{len(reference.probes)} probes" + (f", step {step}" if step is not None else "")
    return Report(
        server.url,
        f"{server.kind} {server.version}".strip(),
        target.model,
        target.base,
        str(reference.folder),
        about,
        profile,
        checks,
        time.perf_counter() - began,
    )


def run_checks(asked: Asked, only: Sequence[str] = ()) -> tuple[Row, ...]:
    """Run the checks that apply, each on the answers that the earlier ones got.

    One that raises has proven nothing, and is "unknown" with its reason. If the server has gone,
    all others have that reason, too.
    """
    left_out: tuple[str, ...] = ()
    if asked.reference.base is None:
        left_out = ("adapter", "base")
    elif asked.base is None:
        left_out = ("base",)
    rows: list[Row] = []
    gone = ""
    for name, check in CHECKS.items():
        if name in left_out or (only and name not in only):
            continue
        reason = gone
        if not gone:
            try:
                rows.append(check(asked))
                continue
            except PlumblineError as error:
                reason = "; ".join(filter(None, (error.message, error.hint)))
                if error.code in ("unreachable", "login"):
                    gone = reason
            except Exception as error:
                reason = f"the check itself failed: {type(error).__name__}: {error}"
        rows.append(Row(name, "unknown", reason))
    return tuple(rows)
