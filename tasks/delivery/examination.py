"""The first step of a delivery: audit SOURCE, and refuse it if an error stops the delivery.

reports = examine([Path("ckpt")], base, check_base=True)     audit; ConfigError for SOURCE refused
report = examination(out, reports=reports, log=log)          the stage that stores the findings
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.audit.check import Finding, Severity
from tasks.audit.checks.files import TRAINER_STATE
from tasks.audit.run import Report, audit
from tasks.audit.source import ADAPTER_CONFIG, CONFIG, Kind
from tasks.core.contract import Check
from tasks.core.errors import ConfigError, first_and_more
from tasks.core.terminal import typed
from tasks.evaluation.model_folder import write_json
from tasks.pipeline.report import StageReport
from tasks.weights.files.reader import weight_files
from tasks.weights.heads import WRAPPER
from tasks.weights.tokens.prove_ids import is_leading, misread

HANDLED = {
    "HEAD_PLACE": "split off, and kept as an artifact of its own",
    "HEAD_UNUSABLE": "the saved head is used, under the name and with the labels that it has",
    "WRAPPER_RESIDUE": "the prefix is taken off: nothing is lost",
    "WRONG_BASE": "refused in the next step, by the same test",
    "MANIFEST_DIFFERS": "refused later: every byte is compared with the manifest first",
    "PICKLE_CALLS": "the trainer's state is neither read nor served",
    "EOS_DISAGREES": "served with the EOS ids of all files",
}
"""Reason why an error does not stop a delivery, by code. Repairs happen in OUT, not in SOURCE."""
_OF_THE_BASE = ("WRONG_BASE", "MERGED_EQUALS_BASE")


def handled(finding: Finding, report: Report, *, check_base: bool) -> str:
    """Return the reason why an error does not stop the delivery; "" if it stops it.

    `check_base` is True if a wrong base is refused.
    """
    if finding.code in _OF_THE_BASE and not check_base:
        return "check_base=false"
    file = finding.file
    fits = {
        "HEAD_UNUSABLE": file == CONFIG,
        # The plan takes TRL's wrapper only from a model with its head.
        "WRAPPER_RESIDUE": not finding.tensor.startswith(WRAPPER) or report.kind == Kind.VALUE,
        "WRONG_BASE": file == ADAPTER_CONFIG,
    }
    if finding.code.startswith("PICKLE_"):
        fits[finding.code] = TRAINER_STATE.fullmatch(Path(file).name) is not None
    return HANDLED.get(finding.code, "") if fits.get(finding.code, True) else ""


FINDINGS = "findings.json"
_TO_GATHER = (Kind.DEEPSPEED, Kind.SHARDS, Kind.DISTRIBUTED)
_SHOWN = 50
_SHARDS = "ZERO_NOT_GATHERED"
"""Finding that intact shards lie beside broken weights. Its fix, to gather them, comes first."""


def examine(
    roots: Sequence[Path], base: Path | None, *, check_base: bool = True
) -> tuple[Report, ...]:
    """Audit the folders to deliver: models from headers and documents, adapters with values.

    Raises ConfigError for errors that stop the delivery, each with code, place and fix.
    """
    reports = tuple(
        # The plan reads the weights of a model: here they would be read twice.
        audit(
            root, base=base, values=None if (root / ADAPTER_CONFIG).is_file() else False, alone=True
        )
        for root in roots
    )
    if any(_blocking(report, check_base=check_base) for report in reports):
        raise refused(reports, check_base=check_base)
    return reports


READ = 2 << 30
"""Most bytes of a base whose weights are read for a plan, or before training."""


def base_errors(base: Path, *, whole: bool = False) -> Report:
    """Return the audit of a base, with only the errors that make it unusable as one.

    `whole` reads the weights, and hashes those of a hub cache, above `READ`, too.
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
        beside = (item.fix for item in report.findings if item.code == _SHARDS)
        fix = fix or (next(beside, "") if report.kind not in _TO_GATHER else "")
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


def examined(reports: Sequence[Report]) -> Iterator[tuple[Finding, str]]:
    """Yield every finding, and why this error does not stop the delivery; "" if it is no error."""
    for report in reports:
        for finding in report.findings:
            is_error = finding.severity is Severity.ERROR
            yield finding, handled(finding, report, check_base=False) if is_error else ""


def lines(reports: Sequence[Report]) -> Iterator[str]:
    """Yield the lines of the plan: counts, warnings, and errors that do not stop the delivery."""
    for report in reports:
        yield f"audit: {report.counts}"
    for finding, why in examined(reports):
        if why or finding.severity is Severity.WARNING:
            yield f"  {finding.code} {finding.where}: {why or finding.found}"


def as_json(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Return the findings as plain JSON, each with its reason under `handled`."""
    return [{**finding.as_json(), "handled": why} for finding, why in examined(reports)]


def examination(out: Path, *, reports: Sequence[Report], log: Any, **_: Any) -> StageReport:
    """Store the findings of the audit as an artifact; a stage function."""
    kinds: Mapping[str, str] = {report.source: report.kind for report in reports}
    notes = {"sources": kinds, "findings": as_json(reports)}
    write_json(out / FINDINGS, notes)
    for line in lines(reports):
        log.info("%s", line)
    checks = tuple(
        Check(f"{each.code} {each.where}", each.expected, f"{each.found}: {why}", ok=True)
        for each, why in examined(reports)
        if why
    )
    counts = dict.fromkeys((f"audit/{severity.value}s" for severity in Severity), 0.0)
    for finding, _why in examined(reports):
        counts[f"audit/{finding.severity.value}s"] += 1
    return StageReport("report", checks, counts, notes)
