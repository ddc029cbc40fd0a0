"""Find what is wrong with a checkpoint, whatever tool made it.

    python flows/audit.py DIR                        headers and documents: seconds
    python flows/audit.py DIR base=DIR               an adapter or a merge against its base
    python flows/audit.py DIR values=true            tensor data too, at the disk's speed
    python flows/audit.py MERGED base=DIR adapter=DIR values=true    check every merged tensor
    python flows/audit.py DIR out=report.json        the report as JSON; out=- prints it
    python flows/audit.py DIR fix=true out_dir=NEW   a repaired copy, if that loses no data
    python flows/audit.py DIR verify=key.pub         every byte against its signature
    python flows/audit.py DIR prefect=true           recorded: a flow run, an MLflow run

DIR is short for `source=DIR`. Works from any directory; writes nothing into DIR, runs nothing from
it and unpickles nothing. Exit status: 0 no error was found (or all are repaired), 1 errors, 2 DIR
cannot be read or repaired, or the command line is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Before Prefect is imported, which takes longer than an audit.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "audit")

from typing import Any

from prefect import flow

from flows.orchestration.audit_record import recorded
from flows.orchestration.flow_body import reported
from flows.orchestration.registry_audit import audit_versions


@flow(name="audit", flow_run_name="audit-{tag}", persist_result=False)
def audit(overrides: list[str] | None = None, tag: str = "manual") -> dict[str, Any]:
    """Run an audit as a flow, for schedules and for records (`prefect=true`).

    Args:
        overrides: words of the command, e.g. `["source=/ckpt", "base=/models/qwen"]`.
        tag: free text that tells runs apart in lists.

    Returns:
        The report, as in `out=FILE.json`; with `fix=true` also the repairs.
    """
    return reported(lambda: recorded(overrides or []))


@flow(name="audit-registry", flow_run_name="audit-registry-{tag}", persist_result=False)
def audit_registry(overrides: list[str] | None = None, tag: str = "manual") -> dict[str, Any]:
    """Verify and audit every registered model that an alias points to, for a schedule.

    Args:
        overrides: words of the command, e.g. `["values=true"]`; none that name a single folder.
        tag: free text that tells runs apart in lists.

    Returns:
        `versions`: one row for each version, as in the table of the flow run; `left_out`: the
        number of the others.
    """
    return reported(lambda: audit_versions(overrides or []))
