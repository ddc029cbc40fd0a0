"""Audit the registered models: the bytes of every served folder, and what is wrong with it.

Every version that an alias points to is audited, and the newest one of a model without aliases.
Prefect gets one table (an artifact of the flow run); an error in any version fails the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from flows.cli.composed import Composed
from flows.cli.tool import read
from flows.commands.audit import examine
from tasks.audit.finding import Severity
from tasks.config.checks import preflight
from tasks.config.checks.release import reachable
from tasks.config.tools import Audit
from tasks.core.errors import (
    ArtifactError,
    ConfigError,
    PlumblineError,
    TrackingError,
    first_and_more,
)
from tasks.core.redaction import redact
from tasks.core.terminal import plain
from tasks.pipeline.artifact import open_artifact, verify
from tasks.tracking.mlflow_registry import Version
from tasks.tracking.mlflow_server import Server
from tasks.tracking.outbox import RefusedError, UnreachableError

KEY = "audit-registry"
_OF_ONE_FOLDER = ("source", "base", "adapter", "out", "fix", "out_dir")


def audit_versions(overrides: list[str]) -> dict[str, Any]:
    """Audit the registered models within a Prefect flow run.

    Args:
        overrides: words of the command `audit`, without those of a single folder.

    Returns:
        `versions`: one row for each audited version, as in the table; `left_out`: the number of
        versions that no alias points to, or that another program has registered.

    Raises:
        ConfigError: an override names a single folder, or MLflow does not answer.
        ArtifactError: a version has an error.
        TrackingError: MLflow has stopped to answer.
    """
    from prefect import get_run_logger
    from prefect.artifacts import create_table_artifact

    composed = read("audit", [f"source={KEY}", *overrides])
    _refuse_single_folders(composed.settings)
    preflight(list(reachable(composed.settings["tracking"]["uri"])))
    registered = _registered(composed)
    audited = list(_in_use(registered))
    rows = []
    for version in audited:
        rows.append(_row(version, composed))
        get_run_logger().info("%s", "  ".join(map(str, rows[-1].values())))
    left_out = len(registered) - len(audited)
    counts = f"{len(rows)} of {len(registered)} registered versions audited"
    create_table_artifact(rows, key=KEY, description=counts)
    get_run_logger().info("%s", counts)
    bad = [f"{row['version']}: {row['problem']}" for row in rows if row["errors"]]
    if bad:
        raise ArtifactError(
            f"registered models are damaged: {first_and_more(bad)}",
            details=bad,
            hint="do not serve these versions; docs/runbook.md, audit-registry",
        )
    return {"versions": rows, "left_out": left_out}


def _registered(composed: Composed) -> list[Version]:
    try:
        return Server(composed.tracking_uri, composed.tracking_root).versions()
    except (UnreachableError, RefusedError) as error:
        uri = redact(composed.tracking_uri)
        raise TrackingError(
            f"{KEY}: the registry of MLflow at {uri} cannot be read: {error}",
            hint="start that server; the next audit reads it again",
        ) from None


def _refuse_single_folders(settings: Mapping[str, Any]) -> None:
    """Refuse settings of the audit of one folder, which would be ignored."""
    default = Audit(source=KEY)
    wrong = [key for key in _OF_ONE_FOLDER if settings[key] != getattr(default, key)]
    if wrong:
        raise ConfigError(
            f"{KEY} audits all registered models, and {wrong[0]} is of one folder",
            details=[f"{key}={settings[key]}" for key in wrong],
            hint="leave it out, or start the audit of one folder: python flows/audit.py DIR",
        )


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
        problems = verify(artifact)
        if artifact.digest != version.digest:
            problems.append(f"digest {artifact.digest[:12]} instead of {version.digest[:12]}")
        report = examine({**composed.settings, "source": str(folder)})
    except PlumblineError as error:
        problem = "; ".join([error.message, *error.details[:1]])
        return {**row, "errors": 1, "warnings": 0, "problem": plain(problem)}
    severities = [finding.severity for finding in report.findings]
    problems += [
        f"{finding.code} {finding.where}: {finding.found}"
        for finding in report.findings
        if finding.severity is Severity.ERROR
    ]
    return {
        **row,
        "errors": len(problems),
        "warnings": severities.count(Severity.WARNING),
        "problem": plain(first_and_more(problems)) if problems else "",
    }
