"""Remove what no run, no registered model and no interrupted training needs any more.

    python flows/prune.py keep=10                show what would go: unused in the last 10 runs
    python flows/prune.py older_than=30          show what would go: unused in the last 30 days
    python flows/prune.py keep=10 older_than=30  show what meets both
    python flows/prune.py keep=10 yes=true       remove it

Artifacts of registered models and all that they were made from stay until their version is deleted
in MLflow. Waits while runs use the folder. Exit status: 0 done, 1 a folder cannot be removed, 2 the
command line is wrong or MLflow does not answer, and nothing was removed.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Before Prefect is imported, which takes longer than a plan.
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from flows.cli.start import start

    start("flows.cli.tool", "prune")

from typing import Any

from prefect import flow

from flows.commands.prune import prune_flow
from flows.orchestration.flow_body import reported


@flow(name="prune", flow_run_name="prune-{tag}", persist_result=False)
def prune(overrides: list[str] | None = None, tag: str = "manual") -> dict[str, Any]:
    """Remove old artifacts as a flow, for schedules.

    Args:
        overrides: words of the command, e.g. `["keep=10", "yes=true"]`.
        tag: free text that tells runs apart in lists.

    Returns:
        `removed`: paths; `freed`: bytes; `kept`: number of artifacts.
    """
    return reported(lambda: prune_flow(overrides or []))
