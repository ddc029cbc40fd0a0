"""Record a verification in Prefect and MLflow (`prefect=true`, and the deployment verify-served).

Prefect gets the checks as a table (an artifact of the flow run), MLflow gets a run:

    tags       verify.verdict, verify.model, verify.causes, prefect.flow_run_id
    metrics    verify/ok, verify/faults, verify/unknown, verify/seconds; check/<check>/<number>
    files      report.json, report.xml, report.txt, config.yaml
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flows.cli.composed import Composed
from flows.cli.tool import read
from flows.commands.verify import ask, show
from flows.orchestration.deployment import in_deployment
from flows.orchestration.flow_run import provenance, tracker_of
from tasks.core.errors import DriftError
from tasks.core.redaction import redact
from tasks.verify.report import Report
from tasks.verify.servers.server import ServerError

KEY = "verify-checks"


def recorded(overrides: list[str]) -> dict[str, Any]:
    """Verify a server within a Prefect flow run, and record the report.

    Args:
        overrides: words of the command `verify`.

    Returns:
        The report as JSON.

    Raises:
        ConfigError: the configuration is wrong, or the server does not answer.
        DriftError: a check found a fault.
        ServerError: the server could not be verified.
    """
    from prefect import get_run_logger
    from prefect.artifacts import create_markdown_artifact

    composed = read("verify", overrides)
    report = ask(composed.settings).answer()
    create_markdown_artifact(redact(report.markdown()), key=KEY, description=redact(report.line))
    _track(composed, report)
    show(report, composed.settings["out"])
    if in_deployment():
        get_run_logger().info("%s", report.text())
    if report.outcome == "verified":
        return report.as_json()
    details = [f"{cause.text} -> {cause.hint}" for cause in report.causes]
    details = details or [f"{check.code}: {check.text}" for check in report.checks]
    kind = DriftError if report.outcome == "fault" else ServerError
    raise kind(report.line, details=details)


def _track(composed: Composed, report: Report) -> None:
    from prefect.runtime import flow_run

    tags = {
        "prefect.flow_run_id": str(flow_run.id),
        "verify.verdict": report.outcome,
        "verify.model": report.model,
        "verify.causes": ", ".join(cause.code for cause in report.causes),
        **provenance(),
    }
    tracker, title = tracker_of(composed), f"verify {Path(report.source).name}"
    with tracker.flow(title, composed.recorded, composed.text, tags):
        files = {
            "report.json": json.dumps(report.as_json(), indent=1) + "\n",
            "report.xml": report.junit(),
            "report.txt": report.text() + "\n",
        }
        tracker.log_parent(_numbers(report), files, report.markdown())


def _numbers(report: Report) -> dict[str, float]:
    verdicts = [check.verdict for check in report.checks]
    measured = {
        f"check/{check.code}/{name}": float(value)
        for check in report.checks
        for name, value in check.measured.items()
        if not isinstance(value, str)
    }
    return {
        "verify/ok": float(verdicts.count("ok")),
        "verify/faults": float(verdicts.count("fault")),
        "verify/unknown": float(verdicts.count("unknown")),
        "verify/seconds": report.seconds,
        **measured,
    }
