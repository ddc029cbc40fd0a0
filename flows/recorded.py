"""Prefect flows of audits and verifications: for schedules, and for `prefect=true`.

The flow `audit` records the findings of one folder, `audit_registry` one row for each registered
model in use, `verify` the checks of a running server. Prefect gets a table (an artifact of the flow
run), MLflow a run with numbers, tags and the report's files.

Arguments of each flow are `overrides`, the words of the command, e.g. `["source=/ckpt"]`, and
`tag`, free text that tells runs apart in lists. Results are the documents of `out=FILE.json`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.runtime import flow_run

from flows.audit import examine
from flows.cli.composed import Composed
from flows.cli.registry import registry
from flows.cli.tool import read
from flows.orchestration.flow_body import reported
from flows.orchestration.flow_run import provenance, tracker_of
from flows.orchestration.prefect_tasks import in_deployment
from flows.verify import show, verified
from tasks.audit.check import Severity
from tasks.core.errors import (
    ArtifactError,
    DriftError,
    PlumblineError,
    first_and_more,
)
from tasks.core.redaction import redact
from tasks.core.terminal import plain
from tasks.pipeline.artifact import open_artifact
from tasks.pipeline.artifact import verify as damages
from tasks.tracking.mlflow_registry import Version
from tasks.verify.servers.server import ServerError

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
    markdown = redact(report.markdown())
    create_markdown_artifact(markdown, key="audit-findings", description=report.counts)
    severities = Counter(finding.severity for finding in report.findings)
    codes = Counter(finding.code for finding in report.findings)
    _track(
        composed,
        f"audit {Path(report.source).name}",
        {"audit.kind": report.kind, "audit.ok": str(report.ok).lower()},
        {
            **{f"audit/{severity.value}s": float(severities[severity]) for severity in Severity},
            **{f"finding/{code}": float(count) for code, count in codes.items()},
            "audit/seconds": report.seconds,
        },
        {"report.json": _json(report.as_json()), "report.txt": report.text() + "\n"},
        report.markdown(),
    )
    return report.as_json()


def record_verify(composed: Composed) -> dict[str, Any]:
    """Verify a running server, and record the report in Prefect and MLflow."""
    report = verified(composed.settings)
    create_markdown_artifact(
        redact(report.markdown()), key="verify-checks", description=redact(report.line)
    )
    verdicts = [check.verdict for check in report.checks]
    measured = {
        f"check/{check.code}/{name}": float(value)
        for check in report.checks
        for name, value in check.measured.items()
        if not isinstance(value, str)
    }
    _track(
        composed,
        f"verify {Path(report.source).name}",
        {
            "verify.verdict": report.outcome,
            "verify.model": report.model,
            "verify.causes": ", ".join(cause.code for cause in report.causes),
        },
        {
            "verify/ok": float(verdicts.count("ok")),
            "verify/faults": float(verdicts.count("fault")),
            "verify/unknown": float(verdicts.count("unknown")),
            "verify/seconds": report.seconds,
            **measured,
        },
        {
            "report.json": _json(report.as_json()),
            "report.xml": report.junit(),
            "report.txt": report.text() + "\n",
        },
        report.markdown(),
    )
    show(report, composed.settings["out"])
    if in_deployment():
        get_run_logger().info("%s", report.text())
    if report.outcome == "verified":
        return report.as_json()
    details = [f"{cause.text} -> {cause.hint}" for cause in report.causes]
    details = details or [f"{check.code}: {check.text}" for check in report.checks]
    kind = DriftError if report.outcome == "fault" else ServerError
    raise kind(report.line, details=details)


def _track(
    composed: Composed,
    title: str,
    tags: Mapping[str, str],
    numbers: Mapping[str, float],
    files: Mapping[str, str],
    markdown: str,
) -> None:
    """Record a report in MLflow."""
    tags = {"prefect.flow_run_id": str(flow_run.id), **tags, **provenance()}
    tracker = tracker_of(composed)
    with tracker.flow(title, composed.recorded, composed.text, tags):
        tracker.log_parent(numbers, files, markdown)


def _json(document: Any) -> str:
    return json.dumps(document, indent=1) + "\n"


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
    get_run_logger().info("%s", counts)
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
    folder = Path(version.path)
    row = {"version": version.name, "aliases": ", ".join(version.aliases), "folder": str(folder)}
    try:
        artifact = open_artifact(folder, "served")
        problems = damages(artifact)
        if artifact.digest != version.digest:
            problems.append(f"digest {artifact.digest[:12]} instead of {version.digest[:12]}")
        report = examine({**composed.settings, "source": str(folder)})
    except PlumblineError as error:
        problem = "; ".join([error.message, *error.details[:1]])
        return {**row, "errors": 1, "warnings": 0, "problem": plain(problem)}
    problems += [f"{each.code} {each.where}: {each.found}" for each in report.errors]
    severities = [finding.severity for finding in report.findings]
    return {
        **row,
        "errors": len(problems),
        "warnings": severities.count(Severity.WARNING),
        "problem": plain(first_and_more(problems)) if problems else "",
    }
