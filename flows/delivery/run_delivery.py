"""The body of a delivery: with Prefect around its stages, or without.

A command line plans before it starts anything, and the flow of the same process uses that plan.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flows.cli.config import Composed, compose_config
from flows.cli.dry_run import Looker
from flows.cli.lock import hold
from flows.delivery.chain import Delivery
from flows.delivery.prepare import prepare_delivery
from flows.orchestration.flow_run import Attempt, Host, in_prefect, in_this_process, tracker_of
from tasks.core.errors import ConfigError
from tasks.delivery import examination
from tasks.delivery.publish_output import out_findings
from tasks.delivery.untracked import Untracked
from tasks.delivery.verify_inputs import require_intact
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.stage import Mechanism
from tasks.pipeline.tracking import Tracker
from tasks.process.launch import kill_children_on_abort


@dataclass(frozen=True)
class Planned:
    """A delivery that can be run.

    Attributes:
        composed: the configuration it was planned from.
        delivery: what will be done.
        forecast: (stage, "to run: key" or "up to date: key"), in order.
    """

    composed: Composed
    delivery: Delivery
    forecast: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """The plan for a person."""
        return "\n".join(
            [
                *self.delivery.lines(),
                f"runs: {self.composed.runs}",
                "stages:",
                *(f"  {name:<11} {state}" for name, state in self.forecast),
                "weights:",
                *self.delivery.plan_lines(),
            ]
        )


def plan(composed: Composed) -> Planned:
    """Look, plan, check. Writes nothing.

    Raises:
        ConfigError: with everything that rules the delivery out.
    """
    delivery = prepare_delivery(composed)
    looker = Looker(delivery.store, frozenset(composed.settings["force"]))
    scorer = None if delivery.engine is None else looker.scorer
    served = delivery.run(cast(Mechanism, looker), scorer).artifact
    overwrite = bool(composed.settings["overwrite"])
    findings = list(
        out_findings(delivery.out, inputs=[], expected=served.digest or None, overwrite=overwrite)
    )
    if findings:
        raise ConfigError(findings[0], hint="out=<another folder>, or overwrite=true")
    return Planned(composed, delivery, tuple(looker.seen))


def compare(composed: Composed, log: Any) -> None:
    """Print how far apart the two merges of an adapter are (`merge.base=compare`).

    Raises:
        ConfigError: nothing in SOURCE is merged, or the base has one precision only.
    """
    delivery = prepare_delivery(composed)
    if delivery.given.kind != "adapter" or delivery.quantization is None:
        raise ConfigError(
            f"merge.base=compare: {delivery.choice.reason or 'SOURCE is no adapter folder'}: there "
            "is nothing to compare",
            hint="leave merge.base out",
        )
    for line in (f"source: {delivery.given.line()}", f"base: {delivery.base}"):
        print(line)
    for record in delivery.choice.evidence:
        print(f"trained on the base {record.held.value} ({record})")
    threads = composed.settings["smoke"]["threads"]
    with (
        tempfile.TemporaryDirectory() as folder,
        ReferenceScorer(log=log, log_path=Path(folder) / "log", threads=threads) as scorer,
    ):
        print(*delivery.compare(scorer), sep="\n", flush=True)


_handed: dict[str, Planned] = {}


def hand_over(planned: Planned) -> None:
    """Spare the flow that comes next in this process the planning; overrides are all it is given.

    Used once: a later flow of the same settings may find other files.
    """
    _handed[planned.composed.text] = planned


def run_in_prefect(overrides: list[str]) -> dict[str, Any]:
    """The flow's body. Returns the summary."""
    composed = compose_config(overrides, config_name="deliver")
    planned = _handed.pop(composed.text, None) or plan(composed)
    host = in_prefect("deliver")
    if composed.settings["plan"]:
        text = planned.text()
        host.log.info("%s", text)
        return {"status": "planned", "plan": text}
    with hold(composed.runs, composed.settings["paths"]["wait_s"]), kill_children_on_abort():
        return _run(planned, host, tracker_of(composed))


def direct(planned: Planned, log: Any, run_id: str) -> dict[str, Any]:
    """The same without Prefect; MLflow only where `tracking.uri` names one."""
    tracked = planned.composed.settings["tracking"]["uri"]
    tracker = tracker_of(planned.composed) if tracked else Untracked()
    return _run(planned, in_this_process(run_id, log), tracker)


def _run(planned: Planned, host: Host, tracker: Tracker) -> dict[str, Any]:
    delivery = planned.delivery
    attempt = Attempt.begin("deliver", planned.composed, host, tracker=tracker)
    return attempt.run(f"deliver {delivery.given.root.name}", lambda one: _stages(one, delivery))


def _stages(attempt: Attempt, delivery: Delivery) -> None:
    # Not while planning: the first look at an artifact from elsewhere reads all of it.
    require_intact(delivery.inputs, delivery.store)
    attempt.summary.findings = examination.as_json(delivery.reports)
    mechanism = attempt.mechanism
    if delivery.engine is None:
        served = delivery.run(mechanism, None)
    else:
        threads = attempt.composed.settings["smoke"]["threads"]
        log_path = mechanism.logs / "reference.log"
        with ReferenceScorer(log=attempt.host.log, log_path=log_path, threads=threads) as scorer:
            scorer.warm()
            served = delivery.run(mechanism, scorer)
    delivery.put(served, mechanism)
    attempt.summary.served = str(delivery.out)
