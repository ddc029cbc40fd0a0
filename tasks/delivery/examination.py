"""The first step of a delivery: audit SOURCE, and refuse it if an error stops the delivery.

reports = examine([Path("ckpt")], base, check_base=True)     audit; ConfigError for SOURCE refused
report = examination(out, reports=reports, log=log)          the stage that stores the findings
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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


def _always(_: Finding, __: Report) -> bool:
    return True


def _with_head(_: Finding, report: Report) -> bool:
    return report.kind in (Kind.REWARD, Kind.VALUE)


def _wrapped(finding: Finding, report: Report) -> bool:
    """Return True for a wrapper that the plan takes off: TRL's only from a model with its head."""
    return not finding.tensor.startswith(WRAPPER) or report.kind == Kind.VALUE


def _of_config(finding: Finding, _: Report) -> bool:
    return finding.file == CONFIG


def _of_adapter(finding: Finding, _: Report) -> bool:
    return finding.file == ADAPTER_CONFIG


def _of_the_trainer(finding: Finding, _: Report) -> bool:
    return TRAINER_STATE.fullmatch(finding.file.rpartition("/")[2]) is not None


class Handling(NamedTuple):
    """Reason why an error does not stop a delivery, and the condition for it."""

    why: str
    when: Callable[[Finding, Report], bool] = _always


HANDLED: Mapping[str, Handling] = {
    "HEAD_PLACE": Handling("split off, and kept as an artifact of its own"),
    "HEAD_LABELS": Handling("served with the labels that the head has"),
    "HEAD_UNUSABLE": Handling("the saved head is used, under the name that it has", _of_config),
    "WRAPPER_RESIDUE": Handling("the prefix is taken off: nothing is lost", _wrapped),
    "VLLM_ARCHITECTURE": Handling("served as the family's *ForSequenceClassification", _with_head),
    "WRONG_BASE": Handling("refused in the next step, by the same test", _of_adapter),
    "MANIFEST_DIFFERS": Handling("refused later: every byte is compared with the manifest first"),
    "PICKLE_CALLS": Handling("the trainer's state is neither read nor served", _of_the_trainer),
    "EOS_DISAGREES": Handling("served with the EOS ids of all files"),
}
"""Handling by finding code. Repairs happen in OUT; SOURCE is never changed."""

_OF_THE_BASE = frozenset({"WRONG_BASE", "MERGED_EQUALS_BASE"})


def handled(finding: Finding, report: Report, *, check_base: bool) -> str:
    """Return the reason why an error does not stop the delivery; "" if it stops it.

    Args:
        check_base: True if a wrong base is refused.
    """
    if finding.code in _OF_THE_BASE and not check_base:
        return "check_base=false"
    handling = HANDLED.get(finding.code)
    if handling is None or not handling.when(finding, report):
        return ""
    return handling.why


FINDINGS = "findings.json"
_TO_GATHER = (Kind.DEEPSPEED, Kind.SHARDS, Kind.DISTRIBUTED)
_SHOWN = 50
_SHARDS = "ZERO_NOT_GATHERED"
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
