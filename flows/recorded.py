"""Prefect flows of audits and verifications: for schedules, and for `prefect=true`.

The flow `audit` records the findings of one folder, `audit_registry` one row for each registered
model in use, `verify` the checks of a running server. Each calls the function of the command.
Prefect gets an artifact of the flow run, MLflow a run with numbers, tags and the report's files.

Arguments of each flow are `overrides`, the words of the command, e.g. `["source=/ckpt"]`, and
`tag`, free text that tells runs apart in lists. Results are the documents of `out=FILE.json`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.runtime import flow_run

from flows.audit import examine
from flows.cli.composed import Composed
from flows.cli.output import show
from flows.cli.registry import registry
from flows.cli.tool import read
from flows.orchestration.flow_body import reported
from flows.orchestration.flow_run import provenance, tracker_of
from flows.orchestration.prefect_tasks import in_deployment
from flows.verify import verified
from tasks.audit.check import Severity
from tasks.core.errors import ArtifactError, DriftError, PlumblineError, first_and_more
from tasks.core.redaction import redact
from tasks.core.terminal import plain
from tasks.pipeline.artifact import open_artifact
from tasks.pipeline.artifact import verify as damages
from tasks.tracking.mlflow_server import Version
from tasks.verify.server import ServerError

KEY = "audit-registry"


@flow(name="audit", flow_run_name="audit-{tag}", persist_result=False)
def audit(overrides: list[str] | None = None, tag: str = "manual") -> dict[str, Any]:
    """Audit a folder."""
    return reported(lambda: record_audit(read("audit", overrides or [])))


@flow(name="audit-registry", flow_run_name="audit-registry-{tag}", persist_result=False)
def audit_registry(overrides: list[str] | None = None, tag: str = "manual") -> dict[str, Any]:
    """Verify and audit every model that an alias points to, or the newest without any."""
    return reported(lambda: _audit_registry(overrides or []))


@flow(name="verify", flow_run_name="verify-{tag}", persist_result=False)
def verify(overrides: list[str] | None = None, tag: str = "manual") -> dict[str, Any]:
    """Verify a running server; the run fails unless it is the model that was trained."""
    return reported(lambda: record_verify(read("verify", overrides or [])))


def record_audit(composed: Composed) -> dict[str, Any]:
    """Audit a folder, and record the report in Prefect and MLflow."""
    report = examine(composed.settings)
    severities = Counter(finding.severity for finding in report.findings)
    codes = Counter(finding.code for finding in report.findings)
    numbers = {f"audit/{severity.value}s": float(severities[severity]) for severity in Severity}
    numbers |= {f"finding/{code}": float(count) for code, count in codes.items()}
    tags = {"audit.kind": report.kind, "audit.ok": str(report.ok).lower()}
    _record(composed, "audit-findings", report, report.counts, tags, numbers)
    return report.as_json()


def record_verify(composed: Composed) -> dict[str, Any]:
    """Verify a running server, and record the report in Prefect and MLflow."""
    report = verified(composed.settings)
    verdicts = Counter[str](check.verdict for check in report.checks)
    numbers = {
        f"check/{check.code}/{name}": float(value)
        for check in report.checks
        for name, value in check.measured.items()
        if not isinstance(value, str)
    }
    for name, verdict in (("ok", "ok"), ("faults", "fault"), ("unknown", "unknown")):
        numbers[f"verify/{name}"] = float(verdicts[verdict])
    tags = {
        "verify.verdict": report.outcome,
        "verify.model": report.model,
        "verify.causes": ", ".join(cause.code for cause in report.causes),
    }
    _record(composed, "verify-checks", report, report.line, tags, numbers)
    if in_deployment():
        get_run_logger().info("%s", report.text())
    if report.outcome == "verified":
        return report.as_json()
    details = [f"{cause.text} -> {cause.hint}" for cause in report.causes]
    details = details or [f"{check.code}: {check.text}" for check in report.checks]
    kind = DriftError if report.outcome == "fault" else ServerError
    raise kind(report.line, details=details)


def _record(
    composed: Composed,
    key: str,
    report: Any,
    line: str,
    tags: Mapping[str, str],
    numbers: Mapping[str, float],
) -> None:
    """Record a report of an audit or a verification: an artifact in Prefect, a run in MLflow."""
    command, markdown = key.partition("-")[0], report.markdown()
    create_markdown_artifact(redact(markdown), key=key, description=redact(line))
    files = {name: report.form(name) for name in ("report.json", "report.txt", "report.xml")}
    numbers = {**numbers, f"{command}/seconds": report.seconds}
    tags = {"prefect.flow_run_id": str(flow_run.id), **tags, **provenance()}
    tracker, title = tracker_of(composed), f"{command} {Path(report.source).name}"
    with tracker.flow(title, composed.recorded, composed.text, tags):
        tracker.log_parent(numbers, files, markdown)
    show(report, composed.settings["out"])


def _audit_registry(overrides: list[str]) -> dict[str, Any]:
    composed = read("audit", [f"source={KEY}", *overrides])
    with registry(composed) as server:
        registered = server.versions()
    rows = []
    for version in _in_use(registered):
        rows.append(_row(version, composed))
        get_run_logger().info("%s", "  ".join(map(str, rows[-1].values())))
    counts = f"{len(rows)} of {len(registered)} registered versions audited"
    create_table_artifact(rows, key=KEY, description=counts)
    if bad := [f"{row['version']}: {row['problem']}" for row in rows if row["errors"]]:
        raise ArtifactError(
            f"registered models are damaged: {first_and_more(bad)}",
            details=bad,
            hint="do not serve these versions; docs/runbook.md, audit-registry",
        )
    return {"versions": rows, "left_out": len(registered) - len(rows)}


def _in_use(versions: Sequence[Version]) -> Iterator[Version]:
    """Yield the versions of ours with an alias, and the newest one of a model without any."""
    ours = [version for version in versions if version.path]
    models = {version.model: version for version in reversed(ours)}  # the newest comes first
    aliased = [version for version in ours if version.aliases]
    yield from aliased
    without = models.keys() - {version.model for version in aliased}
    yield from (models[model] for model in sorted(without))


def _row(version: Version, composed: Composed) -> dict[str, Any]:
    """Verify and audit one version. Returns its row of the table."""
    problems, warnings = list[str](), 0
    try:
        artifact = open_artifact(Path(version.path), "served")
        problems += damages(artifact)
        if artifact.digest != version.digest:
            problems.append(f"digest {artifact.digest[:12]} instead of {version.digest[:12]}")
        report = examine({**composed.settings, "source": version.path})
        problems += [f"{each.code} {each.where}: {each.found}" for each in report.errors]
        warnings = [each.severity for each in report.findings].count(Severity.WARNING)
    except PlumblineError as error:
        problems = ["; ".join([error.message, *error.details[:1]])]
    return {
        "version": version.name,
        "aliases": ", ".join(version.aliases),
        "folder": version.path,
        "errors": len(problems),
        "warnings": warnings,
        "problem": plain(first_and_more(problems)) if problems else "",
    }
