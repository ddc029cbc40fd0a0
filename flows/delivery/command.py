"""Run `python flows/deliver.py ...` and return its exit status.

With `smoke.engine=none` the stages are called directly: no Prefect and no server, no
torch.distributed and no vLLM, and MLflow only if `tracking.uri` is set. With an engine the command
runs a Prefect flow, as `flows/rlhf.py` does.
"""

from __future__ import annotations

import logging
import os
import uuid
from typing import Any

from flows.cli.bootstrap import bootstrap
from flows.cli.composed import Composed
from flows.cli.entry import run_main
from flows.cli.outcome import completed, exit_status
from flows.cli.signals import exit_on_signals
from flows.delivery.run_delivery import compare, direct, plan, run_in_prefect
from tasks.core.redaction import without_passwords
from tasks.core.terminal import to_stderr
from tasks.delivery.base import COMPARE
from tasks.pipeline.locks import Patience, hold
from tasks.process.child import PROJECT


def main() -> int:
    """Run the command of this process. Returns the exit status."""
    with exit_on_signals():
        return run_main("deliver", _job)


def _job(composed: Composed, overrides: list[str]) -> int:
    """Plan and run one delivery. Whatever can be refused is refused before anything is written."""
    bootstrap(PROJECT, composed.runs)
    if composed.settings["merge"]["base"] == COMPARE:
        compare(composed, _log())
        return 0
    planned = plan(composed)
    print(planned.text(), flush=True)
    if composed.settings["plan"]:
        return 0
    patience = Patience(composed.settings["paths"]["wait_s"], to_stderr)
    with hold(composed.runs, patience):
        if planned.delivery.engine is None:
            typed = without_passwords(overrides)
            summary = direct(planned, _log(), uuid.uuid4().hex, typed)
            return completed(composed.runs, summary)
        from flows.orchestration.flow_body import start

        def body() -> dict[str, Any]:
            return run_in_prefect(planned, without_passwords(overrides))

        state = start("flows.deliver:deliver", composed, overrides, body)
        return exit_status(state, composed.runs)


def _log() -> logging.Logger:
    """Return a logger to standard error; without Prefect nothing else configures logging."""
    log = logging.getLogger("plumbline.deliver")
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s | %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
        log.setLevel(os.environ.get("PLUMBLINE_LOG_LEVEL", "INFO"))
        log.propagate = False
    return log
