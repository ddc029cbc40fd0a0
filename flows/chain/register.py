"""Apply the gate to a finished run, and register the model that it serves."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from flows.orchestration.flow_run import FlowRun
from flows.orchestration.summary import candidate_line, last_metrics, of_last_step, stage_entry
from flows.report.card import chain_card
from tasks.core.errors import TrackingError
from tasks.pipeline.artifact import CARD, Artifact, remember
from tasks.pipeline.stage import StageResult
from tasks.register import register, require_passed
from tasks.release.gate import Gate, conditions, judge, measured, run_kinds
from tasks.release.model_card import write_card
from tasks.tracking.mlflow_server import CHAMPION, EVALUATED_ON, GATE, NUMBERS, RegisteredModel
from tasks.tracking.tracker import Tracker


def register_served(
    flow_run: FlowRun, served: Artifact, tracker: Tracker, last: Mapping[str, Any]
) -> None:
    """Apply the gate and register. Never cached: the registry may have been emptied since.

    Raises ContractError if the gate has not passed; the model is registered as a candidate.
    """
    results, summary = flow_run.mechanism.results, flow_run.summary
    before = time.monotonic()
    read = {r.name: r.artifact for r in results if r.artifact.kind == "report"}
    try:
        with flow_run.record.stage("register"):
            gate, tags = _judge(results, tracker, last)
            summary.gate = gate.as_json()
            flow_run.tags |= tags
            if gate.verdicts:
                _log_gate(flow_run, gate)
            summary.gate |= flow_run.host.call(
                "register",
                lambda log: _write_version(flow_run, served, gate, tracker, last),
                {"served": served, **read},
            )
    except TrackingError as error:  # the model is complete: only the register has to be repeated
        summary.unregistered = f"{error.message} -> {error.hint}"
        return
    if version := summary.gate.get("version"):
        entry = {
            "name": "register",
            "seconds": round(time.monotonic() - before, 2),
            "reused": False,
            "artifact": version,
            "tensors_checked": 0,
            "drift": None,
            "handoff": None,
        }
        summary.stages = [*map(stage_entry, results), entry]
    require_passed(gate)


def _judge(
    all_results: Sequence[StageResult], tracker: Tracker, last: Mapping[str, Any]
) -> tuple[Gate, dict[str, str]]:
    """Judge the conditions of the gate. Returns the verdict, and tags for later comparisons."""
    results, metrics = of_last_step(all_results), last_metrics(all_results)
    drifts = {r.name.rpartition(".")[2]: r.drift for r in results if r.drift}
    asked = conditions(
        last["gate"]["conditions"] or {}, last["gate"]["min_eval_gain"], run_kinds(last)
    )
    champion = None
    if any(condition.to == CHAMPION for condition in asked):
        champion = tracker.champion(last["tracking"]["model_name"])
    numbers, rows = measured(metrics, drifts), ""  # rows: hash of the evaluation rows
    if data := next((r.artifact for r in results if r.artifact.kind == "dataset"), None):
        rows = str(data.manifest()["files"].get("heldout.jsonl", {}).get("blake3", ""))
    gate = judge(asked, metrics, numbers, champion, rows)
    own = {name: value for name, value in numbers.items() if not name.startswith("base:")}
    verdict = "passed" if gate.passed else gate.reasons[0]
    return gate, {NUMBERS: json.dumps(own), EVALUATED_ON: rows, GATE: verdict}


def _log_gate(flow_run: FlowRun, gate: Gate) -> None:
    """Show the table of the gate, and log it in MLflow."""
    flow_run.host.log.info("%s", gate.text())
    rows = gate.as_json()["conditions"]
    data = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
    files = {"gate.json": json.dumps(data, indent=1)}  # as MLflow's `log_table` writes it
    metrics = {"gate/passed": float(gate.passed)}
    flow_run.mechanism.tracker.log_parent(metrics, files, gate.markdown())


def _write_version(
    flow_run: FlowRun,
    served: Artifact,
    gate: Gate,
    tracker: Tracker,
    last: Mapping[str, Any],
) -> dict[str, str]:
    results, settings = flow_run.mechanism.results, flow_run.composed.settings
    if write_card(served.path, chain_card(results, served, last, flow_run.summary.command or "")):
        remember(served, flow_run.mechanism.store / ".seen")
    model = RegisteredModel(
        settings["tracking"]["model_name"],
        served,
        trained_at=[r.artifact for r in results if r.artifact.kind == "shards"][-1].created,
        tags={
            "exp": flow_run.summary.exp or "",
            **flow_run.tags,
            **{f"digest.{result.artifact.kind}": result.artifact.digest for result in results},
        },
        card=(served.path / CARD).read_text(),
    )
    registered = register(tracker, model, gate, promote=settings["register"]["promote"])
    if registered.candidate != registered.version:
        flow_run.host.log.info("register: %s", candidate_line(asdict(registered)))
    return asdict(registered)
