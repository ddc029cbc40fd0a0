"""SOURCE: recognise it, audit it, and refuse it if an error stops the delivery.

source = open_folder(Path("ckpt/checkpoint-500"))
source.line()    "ckpt/checkpoint-500: a PEFT adapter of rank 8 (adapter_model.safetensors)"
report = examine(source, check_base=True)                 audit; ConfigError for SOURCE refused
examination(out, report=report, log=log)                  the stage that stores the findings
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.audit.check import Finding, Severity
from tasks.audit.checks.files import TRAINER_STATE
from tasks.audit.checks.tokens import GENERIC_TOKENIZER
from tasks.audit.known import SETTINGS
from tasks.audit.run import Report, audit_opened
from tasks.audit.source import (
    ADAPTER_CONFIG,
    CONFIG,
    Kind,
    Source,
    open_source,
    recognise,
    setting,
)
from tasks.core.contract import Check
from tasks.core.errors import ArtifactError, ConfigError, first_and_more
from tasks.core.files import meant
from tasks.core.terminal import command, typed
from tasks.pipeline.stage import StageReport
from tasks.process.output import Log
from tasks.weights.files.documents import write_json
from tasks.weights.heads import WRAPPER
from tasks.weights.tokens.prove_ids import is_leading, misread

_TO_GATHER = (Kind.DEEPSPEED, Kind.SHARDS, Kind.DISTRIBUTED)


def open_folder(root: Path) -> Source:
    """Recognise SOURCE from its file names, its documents and the headers of its weights.

    Trainer leaves finished weights beside a folder of DeepSpeed states. Such a folder counts as the
    finished weights; name the folder of the states (`global_step...`) to deliver those.
    """
    try:
        source = recognise(root)
    except ArtifactError as error:
        missing = not root.is_dir()
        message = f"source={root}: no such folder" if missing else error.message
        hint = typed("source", (missing and meant(root)) or "<folder>")
        raise ConfigError(message, hint=hint) from error
    if not (source.is_model or source.is_adapter or source.kind in _TO_GATHER):
        raise refused(audit_opened(source))
    source.alone = True
    return source


# The audit.

HANDLED = {
    "HEAD_PLACE": "left out: it stays in SOURCE, for training",
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
_SHOWN = 50
_SHARDS = "ZERO_NOT_GATHERED"
"""Finding that intact shards lie beside broken weights. Its fix, to gather them, comes first."""


def examine(source: Source, *, check_base: bool = True) -> Report:
    """Audit the folder to deliver: a model from headers and documents, an adapter with values.

    Raises ConfigError for errors that stop the delivery, each with code, place and fix.
    """
    # The plan reads the weights of a model: here they would be read twice.
    source.values = None if source.is_adapter else False
    report = audit_opened(source)
    if _blocking(report, check_base=check_base):
        raise refused(report, check_base=check_base)
    return report


def base_errors(report: Report) -> Report:
    """Return the audit of a base, with only the errors that make it unusable as one."""
    return replace(report, findings=tuple(_blocking(report, check_base=True, is_base=True)))


def require_base(root: Path, *, values: bool | None = None) -> Source:
    """Open a base. Raises ConfigError if it is broken itself; `require_own_ids` has to follow."""
    base = open_source(root, values=values)
    base.alone = True
    report = base_errors(audit_opened(base))
    if report.findings:
        raise refused(report, key="base", hint=report.typed)
    return base


def require_sound(base: Path) -> tuple[str, ...]:
    """Refuse a base that is broken or whose tokenizer is misread. Returns warnings."""
    require_base(base)
    return require_own_ids(base)


def require_own_ids(folder: Path, served: Path | None = None) -> tuple[str, ...]:
    """Refuse a tokenizer that transformers, and vLLM with it, misreads. Returns warnings.

    `served` has the same files as they are going to be served, with the model's config.json.
    """
    reason = misread(served or folder)
    if not reason:
        return ()
    if is_leading(reason):
        return (f"{folder}: the tokenizer as loaded: {reason}",)
    raise ConfigError(
        f"{folder}: the tokenizer is misread by transformers and vLLM: {reason}",
        hint=f"{setting(SETTINGS, tokenizer_class=GENERIC_TOKENIZER)}, if that reads it right",
    )


def refused(
    report: Report, *, check_base: bool = True, key: str = "source", hint: str = ""
) -> ConfigError:
    """Return the error that refuses a delivery, with the place and the fix of every finding."""
    lines, reasons = [], []
    for finding in _blocking(report, check_base=check_base, is_base=key == "base")[:_SHOWN]:
        found, expected = finding.found, finding.expected
        reasons.append(f"{finding.code} {finding.where}: {found}; expected {expected}")
        lines += [reasons[-1], f"  why: {finding.why}", f"  fix: {finding.fix}"]
    fix = ""
    if report.kind not in _TO_GATHER:
        fix = next((each.fix for each in report.findings if each.code == _SHARDS), "")
    what = "the base, not the source: " if key == "base" else ""
    summary = first_and_more(reasons) if reasons else "it cannot be delivered"
    rest = f"{command('audit', source=report.source)} tells the rest"
    return ConfigError(
        f"{what}{key}={report.source}: {report.what}: {summary}",
        details=lines,
        hint=hint or fix or report.mending or rest,
    )


def _blocking(report: Report, *, check_base: bool, is_base: bool = False) -> list[Finding]:
    """Return the errors of a report that stop the delivery."""
    errors = (each for each in report.findings if each.severity is Severity.ERROR)
    return [
        error
        for error in errors
        # Training and servers read a base as it is: only of a source are prefixes taken off.
        if (is_base and error.code == "WRAPPER_RESIDUE")
        or not handled(error, report, check_base=check_base)
    ]


def examined(report: Report) -> Iterator[tuple[Finding, str]]:
    """Yield every finding, and why this error does not stop the delivery; "" if it is no error."""
    for finding in report.findings:
        is_error = finding.severity is Severity.ERROR
        yield finding, handled(finding, report, check_base=False) if is_error else ""


def audit_lines(report: Report) -> Iterator[str]:
    """Yield the lines of the plan: counts, warnings, and errors that do not stop the delivery."""
    yield f"audit: {report.counts}"
    for finding, why in examined(report):
        if why or finding.severity is Severity.WARNING:
            yield f"  {finding.code} {finding.where}: {why or finding.found}"


def findings_json(report: Report) -> list[dict[str, Any]]:
    """Return the findings as plain JSON, each with its reason under `handled`."""
    return [{**finding.as_json(), "handled": why} for finding, why in examined(report)]


def examination(out: Path, *, report: Report, log: Log, **_: Any) -> StageReport:
    """Store the findings of the audit as an artifact; a stage function."""
    notes = {"sources": {report.source: report.kind}, "findings": findings_json(report)}
    write_json(out / FINDINGS, notes)
    for line in audit_lines(report):
        log.info("%s", line)
    checks = tuple(
        Check(f"{each.code} {each.where}", each.expected, f"{each.found}: {why}", ok=True)
        for each, why in examined(report)
        if why
    )
    counts = dict.fromkeys((f"audit/{severity.value}s" for severity in Severity), 0.0)
    for finding in report.findings:
        counts[f"audit/{finding.severity.value}s"] += 1
    return StageReport("report", checks, counts, notes)
