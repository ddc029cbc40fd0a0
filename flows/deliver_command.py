"""`python flows/deliver.py ...`: from a command line to an exit status.

With `smoke.engine=none` no Prefect and no server, no torch.distributed and no vLLM: the stages are
called directly, and MLflow is there only when `tracking.uri` names one. With an engine it is a flow
as `flows/rlhf.py` is one.
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from pathlib import Path

from flows.bootstrap import bootstrap
from flows.config import Composed
from flows.deliver_body import direct, prepared, show
from flows.entry import run_main
from flows.lock import hold
from flows.signals import exit_on_signals
from tasks.errors import PlumblineError
from tasks.launch import kill_children_on_abort

PROJECT = Path(__file__).resolve().parents[1]


def main() -> int:
    """Entry of `flows/deliver.py`. Returns the exit status."""
    with exit_on_signals():
        return run_main("deliver", _job)


def _job(composed: Composed, overrides: list[str]) -> int:
    """One delivery: everything that can be refused is refused before anything is written."""
    bootstrap(PROJECT, composed.runs)
    delivery = prepared(composed)
    print(show(delivery, composed), flush=True)
    if composed.settings["plan"]:
        return 0
    try:
        with (
            hold(composed.runs, composed.settings["paths"]["wait_s"]),
            kill_children_on_abort(),
        ):
            if delivery.engine is None:
                return _directly(composed)
            return _in_prefect(composed, overrides)
    except PlumblineError as error:
        print(error.report(), file=sys.stderr)
        return error.exit_code


def _directly(composed: Composed) -> int:
    log = logging.getLogger("plumbline.deliver")
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s | %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(os.environ.get("PLUMBLINE_LOG_LEVEL", "INFO"))
        log.propagate = False
    direct(composed, log, uuid.uuid4().hex[:8])
    return _finish(composed)


def _in_prefect(composed: Composed, overrides: list[str]) -> int:
    from flows.prefect_server import prefect_server

    with prefect_server(composed.runs, meanwhile=("flows.deliver", "mlflow")):
        from flows.deliver import deliver

        state = deliver(overrides, tag=composed.settings["tag"] or "manual", return_state=True)
        if state.is_completed():
            return _finish(composed)
        error = state.result(raise_on_failure=False)
        if isinstance(error, PlumblineError):
            print(f"\n{error.report()}\n  logs: {composed.runs / 'logs'}", file=sys.stderr)
            return error.exit_code
        said = f"{type(error).__name__}: {error}"
        print(f"\n{said}\n  logs: {composed.runs / 'logs'}", file=sys.stderr)
        return 1


def _finish(composed: Composed) -> int:
    print((composed.runs / "latest" / "summary.txt").read_text())
    return 0
