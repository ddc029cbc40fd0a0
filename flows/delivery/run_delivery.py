"""Run `python flows/deliver.py ...`: plan a delivery and run it, with Prefect or without.

With `smoke.engine=none` the stages are called directly: no Prefect and no server, no
torch.distributed and no vLLM, and MLflow only if `tracking.uri` is set. With an engine the command
runs a Prefect flow, as `flows/rlhf.py` does.
"""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.chain.dry_run import DryRun
from flows.cli.bootstrap import bootstrap
from flows.cli.composed import Composed
from flows.cli.config import compose_config
from flows.cli.entry import run_main
from flows.cli.outcome import completed, exit_status
from flows.delivery.planned import Delivery, prepare_delivery
from flows.delivery.stages import DeliveryStages
from flows.orchestration.flow_run import (
    FlowRun,
    Host,
    in_this_process,
    tracker_of,
)
from tasks.core.errors import ConfigError
from tasks.core.redaction import without_passwords
from tasks.core.terminal import plain, to_stderr
from tasks.delivery import examination
from tasks.delivery.base import COMPARE
from tasks.delivery.comparing import compare_bases
from tasks.delivery.folders import out_findings, require_intact
from tasks.delivery.reference import encode_probes, probe_texts
from tasks.delivery.source import role, weights_of
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.pipeline.artifact import Artifact, Origin
from tasks.pipeline.locks import Patience, hold
from tasks.pipeline.report import FlowTracker, StageRecord
from tasks.process.child import PROJECT


def main() -> int:
    """Run the command of this process. Returns the exit status."""
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


@dataclass(frozen=True)
class Planned:
    """A planned delivery and the state of its stages."""

    composed: Composed  # the configuration
    delivery: Delivery  # the planned delivery
    forecast: tuple[tuple[str, str], ...]  # (stage, "to run: key" or "up to date: key"), in order

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
    """Read SOURCE and base, plan and check. Writes nothing."""
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
    choice, smoke = delivery.choice, composed.settings["smoke"]
    if delivery.given.kind != "adapter" or choice.quantization is None or delivery.base is None:
        raise ConfigError(
            f"merge.base=compare: {choice.reason or 'SOURCE is no adapter folder'}: there is "
            "nothing to compare",
            hint="leave merge.base out",
        )
    for line in (f"source: {delivery.given.line()}", f"base: {delivery.base}"):
        print(plain(line))
    for record in choice.evidence:
        print(plain(f"trained on the base {record.precision.value} ({record})"))
    factors = weights_of(delivery.adapters)
    roots = {role(index): each.given.root for index, each in enumerate(delivery.adapters)}
    model = ModelRef(
        delivery.base,
        delivery.given.root,
        dtype=delivery.dtype,
        attn_implementation=delivery.attention,
        weighted={str(roots[name]): weight for name, weight in factors.items()} or None,
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        ReferenceScorer(log=log, log_path=Path(folder) / "log", threads=smoke["threads"]) as scorer,
    ):
        texts = probe_texts(smoke["texts"], smoke["probes"])
        lines = compare_bases(
            model,
            choice.quantization,
            encode_probes(scorer, delivery.tokens.folder, texts, delivery.probe_tokens),
            scorer=scorer,
            is_reward=delivery.work.is_reward,
            trained=smoke["texts"] is not None,
        )
        print(*map(plain, lines), sep="\n", flush=True)


def prepare(overrides: list[str]) -> Planned:
    """Compose the configuration of a delivery, and plan it."""
    return plan(compose_config(overrides, config_name="deliver"))


def run_in_prefect(planned: Planned, overrides: list[str]) -> dict[str, Any]:
    """Run a delivery within a Prefect flow run. Returns the summary."""
    composed = planned.composed
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
    """Run a delivery without Prefect, and without MLflow unless `tracking.uri` names a server."""
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
