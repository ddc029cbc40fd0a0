"""Tell runs of Prefect deployments from those of a terminal, and let runs wait for their turn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tasks.pipeline.locks import Patience, hold


def in_deployment() -> bool:
    """Return True within a flow run that a worker started for a deployment."""
    from prefect.runtime import flow_run

    return _has_deployment(str(flow_run.id))


@cache
def _has_deployment(flow_run_id: str) -> bool:
    """Ask once: every question is a request to the server."""
    from prefect.runtime import deployment

    return deployment.id is not None


@contextlib.contextmanager
def hold_runs(runs: Path, wait_s: float | None) -> Iterator[Patience]:
    """Enter the folder of runs within a flow; yields how long the run waits for others.

    Args:
        runs: `paths.runs`.
        wait_s: `paths.wait_s`, for a run on a terminal; a deployment's run waits as long as it
            takes.

    Raises:
        BusyError: another process has the folder alone, still after `wait_s` seconds.
    """
    from prefect import get_run_logger

    patience = Patience(None if in_deployment() else wait_s, get_run_logger().info)
    with hold(runs, patience) as held:
        held.share()
        yield patience
