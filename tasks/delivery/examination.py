"""The first step of a delivery: audit SOURCE, and refuse it if an error stops the delivery.

reports = examine([Path("ckpt")], base, check_base=True)     audit; ConfigError for SOURCE refused
report = examination(out, reports=reports, log=log)          the stage that stores the findings
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tasks.audit.check import Finding, Severity
from tasks.audit.run import Report, audit
from tasks.audit.source import ADAPTER_CONFIG
from tasks.core.contract import Check
from tasks.core.errors import ConfigError, first_and_more
from tasks.core.terminal import typed
from tasks.delivery.handled import handled
from tasks.evaluation.trained_artifact import write_json
from tasks.pipeline.report import StageReport
from tasks.weights.files.reader import weight_files
from tasks.weights.tokens.prove_ids import is_leading, misread

FINDINGS = "findings.json"
_SHOWN = 50
_SHARDS = "ZERO_BESIDE"
"""Finding that intact shards lie beside broken weights. Its fix, to gather them, comes first."""


class Examined(NamedTuple):
    """A finding, and the reason why this error does not stop the delivery; "" if it is no error."""

    finding: Finding
    handled: str


def examine(
    roots: Sequence[Path], base: Path | None, *, check_base: bool = True
) -> tuple[Report, ...]:
    """Audit the folders to deliver: models from headers and documents, adapters with values.

    Args:
        roots: SOURCE, or the folders of several adapters.
        base: base of adapters or gathered weights; not used for a full model.
        check_base: True to refuse a wrong base.

    Raises:
        ConfigError: errors that stop the delivery, each with code, place and fix.
    """
    reports = tuple(
        # The plan reads the weights of a model: here they would be read twice.
        audit(root, base=base, values=None if _is_adapter(root) else False, alone=True)
        for root in roots
    )
    if any(_blocking(report, check_base=check_base) for report in reports):
        raise refused(reports, check_base=check_base)
    return reports


def _is_adapter(root: Path) -> bool:
    return (root / ADAPTER_CONFIG).is_file()


READ = 2 << 30
"""Most bytes of a base whose weights are read for a plan, or before training."""


def base_errors(base: Path, *, whole: bool = False) -> Report:
    """Return the audit of a base, with only the errors that make it unusable as one.

    Args:
        base: its folder.
        whole: True to read the weights, and hash those of a hub cache, above `READ`, too.
    """
    nbytes = sum(file.stat().st_size for file in weight_files(base, "*.safetensors"))
    report = audit(base, values=whole or nbytes <= READ)
    return replace(report, findings=tuple(_blocking(report, check_base=True, is_base=True)))


def require_base(base: Path, *, whole: bool) -> None:
    """Raise ConfigError if the base itself is broken; arguments as for `base_errors`."""
    report = base_errors(base, whole=whole)
    if report.findings:
        raise refused([report], key="base", hint=report.command)


def require_sound(base: Path) -> tuple[str, ...]:
    """Refuse a base that is broken or whose tokenizer is misread. Returns warnings."""
    require_base(base, whole=False)
    return require_own_ids(base)


def require_own_ids(folder: Path) -> tuple[str, ...]:
    """Refuse a tokenizer that transformers, and vLLM with it, misreads. Returns warnings."""
    reason = misread(folder)
    if not reason:
        return ()
    if is_leading(reason):
        return (f"{folder}: the tokenizer as loaded: {reason}",)
    raise ConfigError(
        f"{folder}: the tokenizer is misread by transformers and vLLM: {reason}",
        hint=f"plumbline audit {typed('source', folder)} tells what fixes it",
    )


def refused(
    reports: Sequence[Report], *, check_base: bool = True, key: str = "source", hint: str = ""
) -> ConfigError:
    """Return the error that refuses a delivery, with the place and the fix of every finding."""
    first, rest, fix, repair, lines = "", "", "", "", []
    for report in reports:
        blocking = _blocking(report, check_base=check_base, is_base=key == "base")
        if not blocking and len(reports) > 1:
            continue
        what = "the base, not the source: " if key == "base" else ""
        first = first or f"{what}{key}={report.source}: {report.what}"
        rest = rest or f"plumbline audit {typed('source', report.source)} tells the rest"
        for finding in blocking[:_SHOWN]:
            lines.append(
                f"{finding.code} {finding.where}: {finding.found}; expected {finding.expected}"
            )
            lines.append(f"  why: {finding.why}")
            lines.append(f"  fix: {finding.fix}")
        fix = fix or next((item.fix for item in report.findings if item.code == _SHARDS), "")
        repair = repair or report.mending
    reasons = [line for line in lines if not line.startswith("  ")]
    summary = first_and_more(reasons) if reasons else "it cannot be delivered"
    return ConfigError(
        f"{first}: {summary}",
        details=lines,
        hint=hint or fix or repair or rest,
    )


def _blocking(report: Report, *, check_base: bool, is_base: bool = False) -> list[Finding]:
    """Return the errors of a report that stop the delivery."""
    return [
        finding
        for finding in report.findings
        if finding.severity is Severity.ERROR
        # Training and servers read a base as it is: only of a source are prefixes taken off.
        and ((is_base and finding.code == "WRAPPER_RESIDUE")
             or not handled(finding, report, check_base=check_base))
    ]  # fmt: skip


def examined(reports: Sequence[Report]) -> Iterator[Examined]:
    """Yield every finding, and the reason why it does not stop the delivery."""
    for report in reports:
        for finding in report.findings:
            is_error = finding.severity is Severity.ERROR
            reason = handled(finding, report, check_base=False) if is_error else ""
            yield Examined(finding, reason)


def lines(reports: Sequence[Report]) -> Iterator[str]:
    """Yield the lines of the plan: counts, warnings, and errors that do not stop the delivery."""
    for report in reports:
        yield f"audit: {report.counts}"
    for finding, why in examined(reports):
        if why:
            yield f"  {finding.code} {finding.where}: {why}"
        elif finding.severity is Severity.WARNING:
            yield f"  {finding.code} {finding.where}: {finding.found}"


def as_json(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Return the findings as plain JSON, each with its reason under `handled`."""
    return [{**finding.as_json(), "handled": why} for finding, why in examined(reports)]


def examination(out: Path, *, reports: Sequence[Report], log: Any, **_: Any) -> StageReport:
    """Store the findings of the audit as an artifact; a stage function.

    Args:
        out: staging directory; gets `findings.json`.
        reports: audits of the folders to deliver.
        log: gets the findings in short.
    """
    kinds: Mapping[str, str] = {report.source: report.kind for report in reports}
    findings = as_json(reports)
    write_json(out / FINDINGS, {"sources": kinds, "findings": findings})
    for line in lines(reports):
        log.info("%s", line)
    checks = tuple(
        Check(
            f"{finding.code} {finding.where}", finding.expected, f"{finding.found}: {why}", ok=True
        )
        for finding, why in examined(reports)
        if why
    )
    counts = {
        f"audit/{severity.value}s": float(
            sum(finding["severity"] == severity.value for finding in findings)
        )
        for severity in Severity
    }
    return StageReport("report", checks, counts, {"sources": kinds, "findings": findings})
