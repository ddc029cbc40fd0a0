"""Record an audit in Prefect and MLflow (`prefect=true`).

Prefect gets the findings as a table (an artifact of the flow run), MLflow gets a run:

    tags       audit.kind, audit.ok, prefect.flow_run_id
    metrics    audit/errors, audit/warnings, audit/infos, audit/seconds; finding/<code>: count
    files      report.json, report.txt, config.yaml
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from flows.cli.composed import Composed
from flows.cli.tool import read
from flows.commands.audit import examine, repaired
from flows.orchestration.flow_run import provenance, tracker_of
from tasks.audit.finding import Severity
from tasks.audit.run import Report
from tasks.core.redaction import redact

KEY = "audit-findings"


def recorded(overrides: list[str]) -> dict[str, Any]:
    """Run an audit within a Prefect flow, record it, and repair the checkpoint with `fix=true`.

    Args:
        overrides: words of the command `audit`.

    Returns:
        The report as JSON; with `fix=true` also `repaired`: the new folder, its digest, and the
        repairs.

    Raises:
        ConfigError: the folder cannot be read.
    """
    from prefect.artifacts import create_markdown_artifact

    composed = read("audit", overrides)
    report = examine(composed.settings)
    create_markdown_artifact(redact(report.markdown()), key=KEY, description=report.counts)
    _track(composed, report)
    document = report.as_json()
    if composed.settings["fix"]:
        document["repaired"] = repaired(composed.settings)
    return document


def _track(composed: Composed, report: Report) -> None:
    from prefect.runtime import flow_run

    tags = {
        "prefect.flow_run_id": str(flow_run.id),
        "audit.kind": report.kind,
        "audit.ok": str(report.ok).lower(),
        **provenance(),
    }
    tracker, title = tracker_of(composed), f"audit {Path(report.source).name}"
    with tracker.flow(title, composed.recorded, composed.text, tags):
        files = {
            "report.json": json.dumps(report.as_json(), indent=1) + "\n",
            "report.txt": report.text() + "\n",
        }
        tracker.log_parent(_numbers(report), files, report.markdown())


def _numbers(report: Report) -> dict[str, float]:
    severities = Counter(finding.severity for finding in report.findings)
    codes = Counter(finding.code for finding in report.findings)
    return {
        **{f"audit/{severity.value}s": float(severities[severity]) for severity in Severity},
        **{f"finding/{code}": float(count) for code, count in codes.items()},
        "audit/seconds": report.seconds,
    }
