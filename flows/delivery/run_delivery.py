"""Run `python flows/deliver.py ...`: plan a delivery and run it, with Prefect or without.

With `smoke.engine=none` the stages are called directly: no Prefect and no server, no
torch.distributed and no vLLM, and MLflow only if `tracking.uri` is set. With an engine the command
runs a Prefect flow, as `flows/rlhf.py` does.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from flows.chain.handoff import DryRun
from flows.cli.bootstrap import bootstrap
from flows.cli.composed import Composed
from flows.cli.config import compose_config, run_main
from flows.delivery.planned import Delivery, prepare_delivery
from flows.delivery.stages import to_served
from flows.orchestration.flow_body import completed, exit_status
from flows.orchestration.flow_run import (
    FlowRun,
    Host,
    in_this_process,
    tracker_of,
)
from tasks.core.redaction import redacted
from tasks.core.terminal import to_stderr
from tasks.delivery import examination
from tasks.delivery.folders import require_intact, require_same
from tasks.pipeline.locks import Patience, hold
from tasks.tracking.tracker import Tracker


def main() -> int:
    """Run the command of this process. Returns the exit status."""
    return run_main("deliver", _job)


def _job(composed: Composed, overrides: list[str]) -> int:
    """Plan and run one delivery. Whatever can be refused is refused before anything is written."""
    bootstrap(composed.runs)
    delivery, text = plan(composed)
    print(text, flush=True)
    if composed.settings["plan"]:
        return 0
    patience = Patience(composed.settings["paths"]["wait_s"], to_stderr)
    with hold(composed.runs, patience):
        typed = redacted(overrides)
        if delivery.engine is None:
            summary = direct(delivery, _log(), uuid.uuid4().hex, typed)
            return completed(composed.runs, summary)
        from flows.orchestration.flow_body import start

        body = partial(run_in_prefect, delivery, text, typed)
        state = start("flows.deliver:deliver", composed, overrides, body)
        return exit_status(state, composed)


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


def plan(composed: Composed) -> tuple[Delivery, str]:
    """Read SOURCE and base, plan and check. Writes nothing. Returns the delivery and its text."""
    delivery = prepare_delivery(composed)
    dry_run = DryRun(delivery.store, frozenset(composed.settings["force"]))
    scorer = None if delivery.engine is None else dry_run.scorer
    served = to_served(delivery, dry_run, scorer).artifact
    if not composed.settings["overwrite"]:
        require_same(delivery.out, served.digest)
    return delivery, delivery.text(dry_run.states)


def prepare(overrides: list[str]) -> tuple[Delivery, str]:
    """Compose the configuration of a delivery, and plan it."""
    return plan(compose_config(overrides, config_name="deliver"))


def run_in_prefect(delivery: Delivery, text: str, overrides: list[str]) -> dict[str, Any]:
    """Run a delivery within a Prefect flow run. Returns the summary."""
    from prefect import get_run_logger

    from flows.orchestration.prefect_tasks import in_prefect

    if delivery.settings["plan"]:
        get_run_logger().info("%s", text)
        return {"status": "planned", "plan": text}
    with in_prefect("deliver", delivery.composed) as host:
        return _run(delivery, host, tracker_of(delivery.composed), overrides)


def direct(
    delivery: Delivery, log: Any, run_id: str, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Run a delivery without Prefect, and without MLflow unless `tracking.uri` names a server."""
    # MLflow is not imported without a server, which would take seconds.
    recorded = bool(delivery.settings["tracking"]["uri"])
    tracker = tracker_of(delivery.composed, recorded=recorded)
    patience = Patience(delivery.settings["paths"]["wait_s"], log.info)
    return _run(delivery, in_this_process(run_id, log, patience), tracker, overrides)


def _run(
    delivery: Delivery, host: Host, tracker: Tracker, overrides: Sequence[str]
) -> dict[str, Any]:
    def stages(run: FlowRun) -> None:
        # Not while planning: the first comparison of an artifact with its manifest reads all of it.
        require_intact(delivery.inputs, delivery.store)
        run.summary.findings = examination.as_json(delivery.report)
        with ExitStack() as stack:
            scorer = None
            if delivery.engine is not None:
                scorer = stack.enter_context(run.scorer(delivery.settings["smoke"]["threads"]))
                scorer.warm()
            served = to_served(delivery, run.mechanism, scorer)
        delivery.put(served, run.mechanism.results, run.summary.command or "")
        run.summary.served = str(delivery.out)

    composed = delivery.composed
    flow_run = FlowRun.begin(
        "deliver",
        composed,
        host,
        tracker=tracker,
        overrides=overrides,
        has_page=delivery.engine is not None,
    )
    return flow_run.run(f"deliver {delivery.source.root.name}", stages)
