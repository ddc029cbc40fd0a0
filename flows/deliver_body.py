"""The body of a delivery: with Prefect around its stages, or without.

A command line plans before it starts anything, and the flow of the same process uses that plan.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, cast

from flows.config import Composed, compose_config
from flows.deliver_chain import Delivery
from flows.deliver_prepare import prepare_delivery
from flows.lock import hold
from flows.looker import Looker
from flows.summary import Summary, stage_entry
from tasks.artifact import Artifact, sweep
from tasks.deliver.outlet import out_findings
from tasks.deliver.untracked import Untracked
from tasks.errors import ConfigError, PlumblineError
from tasks.launch import kill_children_on_abort
from tasks.scoring import ReferenceScorer
from tasks.stage import Call, Mechanism, StageResult, as_prefect_task
from tasks.tracking import Tracker

_prepared: dict[str, Delivery] = {}


def prepared(composed: Composed) -> Delivery:
    """The delivery that a configuration asks for, checked. Raises ConfigError."""
    if composed.text not in _prepared:
        delivery = prepare_delivery(composed)
        _refuse_other_delivery(delivery, composed)
        _prepared[composed.text] = delivery
    return _prepared[composed.text]


def show(delivery: Delivery, composed: Composed) -> str:
    """The plan as text."""
    looker, _ = _look(delivery, composed)
    return "\n".join(
        [
            *delivery.lines(),
            f"runs: {composed.runs}",
            "stages:",
            *(f"  {name:<11} {state}" for name, state in looker.seen),
            "weights:",
            *delivery.plan_lines(),
        ]
    )


def _look(delivery: Delivery, composed: Composed) -> tuple[Looker, Artifact]:
    looker = Looker(delivery.store, frozenset(composed.settings["force"]))
    served = delivery.run(
        cast(Mechanism, looker), None if delivery.engine is None else looker.scorer
    )
    return looker, served.artifact


def _refuse_other_delivery(delivery: Delivery, composed: Composed) -> None:
    _, served = _look(delivery, composed)
    overwrite = bool(composed.settings["overwrite"])
    findings = list(
        out_findings(delivery.out, inputs=[], expected=served.digest or None, overwrite=overwrite)
    )
    if findings:
        raise ConfigError(findings[0], hint="out=<another folder>, or overwrite=true")


def run_in_prefect(overrides: list[str]) -> dict[str, Any]:
    """The flow's body. Returns the summary."""
    from prefect import get_run_logger
    from prefect.runtime import flow_run

    composed = compose_config(overrides, config_name="deliver")
    delivery = prepared(composed)
    log: Any = get_run_logger()
    if composed.settings["plan"]:
        log.info("%s", show(delivery, composed))
        return {"status": "planned", "plan": show(delivery, composed)}
    with hold(composed.runs, composed.settings["paths"]["wait_s"]), kill_children_on_abort():
        tracker = Tracker(
            composed.tracking_uri,
            composed.settings["tracking"]["experiment"],
            composed.tracking_root,
        )
        attempt = _Attempt.begin(composed, delivery, tracker, as_prefect_task, str(flow_run.id))
        return attempt.run(log)


def direct(composed: Composed, log: logging.Logger, run_id: str) -> dict[str, Any]:
    """The same without Prefect; MLflow only where `tracking.uri` names one."""
    settings = composed.settings["tracking"]
    tracker: Tracker = Untracked()
    if settings["uri"]:
        tracker = Tracker(composed.tracking_uri, settings["experiment"], composed.tracking_root)

    def call(name: str, work: Any) -> StageResult:
        result: StageResult = work(log)
        return result

    return _Attempt.begin(composed, prepared(composed), tracker, call, run_id).run(log)


@dataclass
class _Attempt:
    """One attempt at a delivery."""

    composed: Composed
    delivery: Delivery
    mechanism: Mechanism
    summary: Summary
    run_id: str
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(
        cls, composed: Composed, delivery: Delivery, tracker: Tracker, call: Call, flow_run_id: str
    ) -> _Attempt:
        run_id = f"{datetime.now():%Y%m%d-%H%M%S}-{flow_run_id[:8]}"
        logs = composed.runs / "logs" / run_id
        logs.mkdir(parents=True)
        sweep(delivery.store)
        force = frozenset(composed.settings["force"])
        mechanism = Mechanism(delivery.store, logs, tracker, force, call)
        summary = Summary("running", "deliver", None, 0.0)
        return cls(composed, delivery, mechanism, summary, run_id)

    def run(self, log: Any) -> dict[str, Any]:
        """Run the chain; write the summary however it ends."""
        settings = self.composed.settings
        try:
            name = f"deliver {self.delivery.given.root.name}"
            with self.mechanism.tracker.flow(name, settings, self.composed.text, {}) as run_id:
                self.summary.mlflow_run_id = run_id or None
                self._stages(log)
                self._end("completed")
        except PlumblineError as error:
            self.summary.error = error.message
            self._end("failed")
            raise
        except BaseException as error:
            ended = isinstance(error, Exception)
            self.summary.error = f"{type(error).__name__}: {error}" if ended else "interrupted"
            self._end("failed" if ended else "cancelled")
            raise
        return asdict(self.summary)

    def _stages(self, log: Any) -> None:
        if self.delivery.engine is None:
            served = self.delivery.run(self.mechanism, None)
        else:
            threads = self.composed.settings["smoke"]["threads"]
            log_path = self.mechanism.logs / "reference.log"
            with ReferenceScorer(log=log, log_path=log_path, threads=threads) as scorer:
                scorer.warm()
                served = self.delivery.run(self.mechanism, scorer)
        self.delivery.put(served, self.mechanism)
        self.summary.served = str(self.delivery.out)

    def _end(self, status: str) -> None:
        self.summary.status = status
        self.summary.seconds = round(time.monotonic() - self.started, 1)
        self.summary.stages = [stage_entry(result) for result in self.mechanism.results]
        self.summary.write(self.composed.runs, self.run_id, {"config.yaml": self.composed.text})
        if status != "completed" or not self.summary.mlflow_run_id:
            return
        files = {"summary.txt": self.summary.table()}
        numbers = {"seconds": self.summary.seconds}
        self.mechanism.tracker.log_parent(numbers, files, self.summary.markdown())
