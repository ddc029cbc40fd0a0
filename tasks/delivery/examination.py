"""The first step of a delivery: the audit of SOURCE, and which of its errors do not stop it.

reports = examine([Path("ckpt")], base, check_base=True)     raises ConfigError for all the others
report = examination(out, reports=reports, log=log)          the stage that keeps what was found
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tasks.audit.finding import Finding, Severity
from tasks.audit.run import Report, audit
from tasks.core.contract import Check
from tasks.core.errors import ConfigError, first_and_more
from tasks.delivery.handled import handled
from tasks.evaluation.trained_artifact import write_json
from tasks.pipeline.report import StageReport

FINDINGS = "findings.json"
_SHOWN = 50
_SHARDS = "ZERO_BESIDE"
"""What was saved badly may be whole in the shards beside it: its fix gathers them."""


class Told(NamedTuple):
    """A finding of a delivery, and why it does not stop it; "" where nothing had to be said."""

    finding: Finding
    handled: str


def examine(
    roots: Sequence[Path], base: Path | None, *, check_base: bool = True
) -> tuple[Report, ...]:
    """Audit what is to be delivered, from headers and documents.

    Args:
        roots: SOURCE, or the folders of several adapters.
        base: what adapters and gathered weights go into; a full model takes nothing from it.
        check_base: whether a wrong base is refused.

    Raises:
        ConfigError: errors that a delivery neither repairs nor passes by, with code, place and fix.
    """
    reports = tuple(audit(root, base=base) for root in roots)
    if any(_in_the_way(report, check_base=check_base) for report in reports):
        raise refused(reports, check_base=check_base)
    return reports


def refused(reports: Sequence[Report], *, check_base: bool = True) -> ConfigError:
    """What to say of checkpoints that cannot be delivered: every error, where it is, what to do."""
    first, fix, mend, lines = "", "", "", []
    for report in reports:
        found = _in_the_way(report, check_base=check_base)
        first = first or (f"source={report.source}: {report.what}" if found else "")
        for one in found[:_SHOWN]:
            lines.append(f"{one.code} {one.where}: {one.found}; expected {one.expected}")
            lines.append(f"  why: {one.why}")
            lines.append(f"  fix: {one.fix}")
        fix = fix or next((one.fix for one in report.findings if one.code == _SHARDS and found), "")
        mend = mend or (report.mending if found else "")
    told = first_and_more([one for one in lines if not one.startswith("  ")])
    return ConfigError(
        f"{first}: {told}",
        details=lines,
        hint=fix or mend or f"python flows/audit.py source={reports[0].source} tells the rest",
    )


def _in_the_way(report: Report, *, check_base: bool) -> list[Finding]:
    return [
        one
        for one in report.findings
        if one.severity is Severity.ERROR and not handled(one, report, check_base=check_base)
    ]


def told(reports: Sequence[Report]) -> Iterator[Told]:
    """Every finding of what is delivered."""
    for report in reports:
        for one in report.findings:
            is_error = one.severity is Severity.ERROR
            yield Told(one, handled(one, report, check_base=False) if is_error else "")


def lines(reports: Sequence[Report]) -> Iterator[str]:
    """For the plan: what was found, and how its errors are dealt with."""
    for report in reports:
        yield f"audit: {report.counts}"
    for finding, why in told(reports):
        if why:
            yield f"  {finding.code} {finding.where}: {why}"
        elif finding.severity is Severity.WARNING:
            yield f"  {finding.code} {finding.where}: {finding.found}"


def as_json(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The findings for a program; each with `handled`, where it is an error that stops nothing."""
    return [{**finding.as_json(), "handled": why} for finding, why in told(reports)]


def examination(out: Path, *, reports: Sequence[Report], log: Any, **_: Any) -> StageReport:
    """Keep what the audit found, where the delivery's other stages keep theirs.

    Args:
        out: staging directory; gets `findings.json`.
        reports: of the folders that are delivered.
        log: what was found, in short.
    """
    kinds: Mapping[str, str] = {report.source: report.kind for report in reports}
    found = as_json(reports)
    write_json(out / FINDINGS, {"sources": kinds, "findings": found})
    for line in lines(reports):
        log.info("%s", line)
    checks = tuple(
        Check(f"{one.code} {one.where}", one.expected, f"{one.found}: {why}", ok=True)
        for one, why in told(reports)
        if why
    )
    counts = {
        f"audit/{one.value}s": float(sum(given["severity"] == one.value for given in found))
        for one in Severity
    }
    return StageReport("report", checks, counts, {"sources": kinds, "findings": found})
