"""Plan and run a delivery, with Prefect or without.

The command plans before it starts anything, and the flow runs its plan.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.chain.dry_run import DryRun
from flows.chain.register import push_served
from flows.cli.composed import Composed
from flows.cli.config import compose_config
from flows.delivery.chain import Delivery
from flows.delivery.prepare import prepare_delivery
from flows.delivery.stages import DeliveryStages
from flows.orchestration.flow_run import (
    FlowRun,
    Host,
    in_this_process,
    tracker_of,
)
from tasks.core.errors import ConfigError
from tasks.core.terminal import plain
from tasks.delivery import examination
from tasks.delivery.folders import out_findings, require_intact
from tasks.evaluation.scoring import ReferenceScorer
from tasks.pipeline.artifact import Artifact, Origin, open_artifact
from tasks.pipeline.locks import Patience
from tasks.pipeline.report import FlowTracker, StageRecord


@dataclass(frozen=True)
class Planned:
    """A planned delivery and the state of its stages.

    Attributes:
        composed: the configuration.
        delivery: the planned delivery.
        forecast: (stage, "to run: key" or "up to date: key"), in order.
    """

    composed: Composed
    delivery: Delivery
    forecast: tuple[tuple[str, str], ...]

    def text(self) -> str:
        """Return the plan as text for the terminal."""
        lines = [
            *self.delivery.lines(),
            f"runs: {self.composed.runs}",
            "stages:",
            *(f"  {name:<11} {state}" for name, state in self.forecast),
            "weights:",
            *self.delivery.plan_lines(),
        ]
        return plain("\n".join(lines))


def plan(composed: Composed) -> Planned:
    """Read SOURCE and base, plan and check. Writes nothing.

    Raises:
        ConfigError: the delivery is impossible or refused.
    """
    delivery = prepare_delivery(composed)
    dry_run = DryRun(delivery.store, frozenset(composed.settings["force"]))
    scorer = None if delivery.engine is None else dry_run.scorer
    served = DeliveryStages(delivery, dry_run, scorer).to_served().artifact
    overwrite = bool(composed.settings["overwrite"])
    findings = list(
        out_findings(delivery.out, inputs=[], expected=served.digest or None, overwrite=overwrite)
    )
    if findings:
        raise ConfigError(findings[0], hint="out=<another folder>, or overwrite=true")
    return Planned(composed, delivery, tuple(dry_run.states))


def compare(composed: Composed, log: Any) -> None:
    """Print the difference of the two merges of an adapter (`merge.base=compare`).

    Raises:
        ConfigError: SOURCE is no adapter, or the base has one precision only.
    """
    delivery = prepare_delivery(composed)
    if delivery.given.kind != "adapter" or delivery.quantization is None:
        raise ConfigError(
            f"merge.base=compare: {delivery.choice.reason or 'SOURCE is no adapter folder'}: there "
            "is nothing to compare",
            hint="leave merge.base out",
        )
    for line in (f"source: {delivery.given.line()}", f"base: {delivery.base}"):
        print(plain(line))
    for record in delivery.choice.evidence:
        print(plain(f"trained on the base {record.held.value} ({record})"))
    threads = composed.settings["smoke"]["threads"]
    with (
        tempfile.TemporaryDirectory() as folder,
        ReferenceScorer(log=log, log_path=Path(folder) / "log", threads=threads) as scorer,
    ):
        print(*map(plain, delivery.compare(scorer)), sep="\n", flush=True)


def prepare(overrides: list[str]) -> Planned:
    """Compose the configuration of a delivery, and plan it."""
    return plan(compose_config(overrides, config_name="deliver"))


def run_in_prefect(planned: Planned, overrides: list[str]) -> dict[str, Any]:
    """Run a delivery within a Prefect flow run. Returns the summary."""
    from prefect import get_run_logger

    from flows.orchestration.prefect_tasks import in_prefect

    composed = planned.composed
    if composed.settings["plan"]:
        text = planned.text()
        get_run_logger().info("%s", text)
        return {"status": "planned", "plan": text}
    with in_prefect("deliver", composed) as host:
        return _run(planned, host, tracker_of(composed), overrides)


def direct(
    planned: Planned, log: Any, run_id: str, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Run a delivery without Prefect, and without MLflow unless `tracking.uri` names a server.

    Args:
        planned: the planned delivery.
        log: logger of the flow.
        run_id: id of this run.
        overrides: what was typed after the command, without passwords.

    Returns:
        The summary.
    """
    tracked = planned.composed.settings["tracking"]["uri"]
    tracker = tracker_of(planned.composed) if tracked else Untracked()
    patience = Patience(planned.composed.settings["paths"]["wait_s"], log.info)
    return _run(planned, in_this_process(run_id, log, patience), tracker, overrides)


def _run(
    planned: Planned, host: Host, tracker: FlowTracker, overrides: Sequence[str]
) -> dict[str, Any]:
    delivery = planned.delivery
    flow_run = FlowRun.begin(
        "deliver", planned.composed, host, tracker=tracker, overrides=overrides
    )
    title = f"deliver {delivery.given.root.name}"
    return flow_run.run(title, lambda run: _run_stages(run, delivery))


def _run_stages(flow_run: FlowRun, delivery: Delivery) -> None:
    # Not while planning: the first comparison of an artifact with its manifest reads all of it.
    require_intact(delivery.inputs, delivery.store)
    flow_run.summary.findings = examination.as_json(delivery.reports)
    mechanism = flow_run.mechanism
    if delivery.engine is None:
        served = DeliveryStages(delivery, mechanism, None).to_served()
    else:
        threads = flow_run.composed.settings["smoke"]["threads"]
        with flow_run.scorer(threads) as scorer:
            scorer.warm()
            served = DeliveryStages(delivery, mechanism, scorer).to_served()
    delivery.put(served, mechanism.results, flow_run.summary.command or "")
    flow_run.summary.served = str(delivery.out)
    push_served(flow_run, open_artifact(delivery.out, "served"))


class Untracked:
    """A `FlowTracker` that records nothing. MLflow is not imported, which would take seconds."""

    page = ""

    @contextmanager
    def flow(
        self, name: str, config: Mapping[str, Any], text: str, tags: Mapping[str, str]
    ) -> Iterator[str]:
        """Open no record."""
        yield ""

    @contextmanager
    def stage(self, name: str, origin: Origin) -> Iterator[StageRecord]:
        """Open no record."""
        yield _NoRecord()

    def log_parent(
        self, metrics: Mapping[str, float], files: Mapping[str, str], description: str = ""
    ) -> None:
        """Drop the numbers and files; the summary has them."""

    def settle(self) -> str:
        """Return no line: there is nothing to record."""
        return ""


class _NoRecord:
    """A `StageRecord` that drops everything; the artifact and its manifest have it."""

    def metrics(
        self, values: Mapping[str, float], step: int = 0, at: int | None = None
    ) -> None: ...
    def table(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None: ...
    def contract(self, verdicts: list[dict[str, Any]]) -> None: ...
    def details(self, notes: Mapping[str, Any]) -> None: ...
    def finish(self, artifact: Artifact, metrics: Mapping[str, float], *, reused: bool) -> None: ...
