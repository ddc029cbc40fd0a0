"""Run `python flows/deliver.py ...`: plan a delivery and run it, with Prefect or without.

With `smoke.engine=none` the stages are called directly: no Prefect and no server, no
torch.distributed and no vLLM, and MLflow only if `tracking.uri` is set. With an engine the command
runs a Prefect flow, as `flows/rlhf.py` does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from flows.chain.handoff import (
    AUDIT,
    GATHER_ADAPTER,
    GATHER_WEIGHTS,
    REFERENCE,
    DryRun,
    HandOff,
    StageRunner,
)
from flows.cli.bootstrap import bootstrap
from flows.cli.composed import Composed
from flows.cli.config import compose_config, run_main
from flows.delivery.planned import Delivery, prepare_delivery
from flows.orchestration.flow_body import completed, exit_status
from flows.orchestration.flow_run import (
    FlowRun,
    Host,
    in_this_process,
    tracker_of,
)
from tasks.audit.source import Kind
from tasks.config.sections import Smoke
from tasks.core.redaction import redacted
from tasks.core.terminal import to_stderr
from tasks.delivery.base import folder_identity
from tasks.delivery.folders import require_intact, require_same
from tasks.delivery.reference import probe_texts, reference
from tasks.delivery.source import examination, findings_json
from tasks.drift.fingerprint import PROFILES
from tasks.evaluation.checks import GREEDY_TOKENS
from tasks.evaluation.scoring import ReferenceScorer
from tasks.gather import gather_foreign
from tasks.pipeline.artifact import Artifact
from tasks.pipeline.locks import Needs, Patience, hold
from tasks.pipeline.stage import StageResult
from tasks.tracking.tracker import Tracker
from tasks.weights.write import parse_size
from tasks.witness.plumbline_witness.prints import FINGERPRINT


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
        run.summary.findings = findings_json(delivery.report)
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


# The stages: audit, gather and the reference here, then the chain's hand-off.


def to_served(
    delivery: Delivery, mechanism: StageRunner, scorer: ReferenceScorer | None
) -> StageResult:
    """Run the stages in order; `Delivery.put` has to follow.

    `scorer` is the transformers child, None to measure nothing. Returns the result of convert, or
    of quantize.
    """
    work, settings = delivery.work, delivery.settings
    source = _foreign(delivery.source.kind, delivery.source.root)
    base = None if delivery.base is None else _foreign("base", delivery.base)
    bases = {} if base is None else {"base": base}
    mechanism.run(
        AUDIT,
        examination,
        inputs={"source": source, **bases},
        config={"check_base": settings["check_base"]},
        context={"report": delivery.report},
    )
    weights = source if work.gather is None else _gather(delivery, mechanism, source, bases)
    before = None
    if scorer is not None:
        before = _reference(delivery, mechanism, scorer, weights, bases)
    smoke, quantization = settings["smoke"], work.choice.quantization
    shared = {each.name: smoke[each.name] for each in fields(Smoke) if each.name in smoke}
    merge_config = {"quantization": quantization, "rounding": settings["merge"]["rounding"]}
    handoff = HandOff(
        mechanism=mechanism,
        scorer=scorer,
        planned=lambda: work,
        settings=settings,
        smoke=Smoke(**shared, max_new_tokens=GREEDY_TOKENS),
        limit=PROFILES[smoke["profile"]],
        attention=delivery.attention,
        reference=before,
        # A reward model has no fingerprint to compare on the way, only scores at the end.
        is_measured=not work.is_reward,
        quantization=quantization,
        dtype=delivery.dtype,
        merge_config=merge_config,
        convert_config={"tokenizer": work.tokens.identity(), "config": dict(work.config)},
    )
    served, quantized = handoff.to_served(weights, base if work.merges else None)
    return quantized or served


def _gather(
    delivery: Delivery, mechanism: StageRunner, source: Artifact, bases: dict[str, Artifact]
) -> Artifact:
    work, inputs, convert = delivery.work, {"trained": source}, delivery.settings["convert"]
    if work.adapter_config is not None:
        text = work.adapter_config.read_bytes()
        stage = GATHER_ADAPTER
        config: dict[str, Any] = {"adapter_config": hashlib.sha256(text).hexdigest()}
    else:
        stage, inputs = GATHER_WEIGHTS, {**inputs, **bases}
        limit = parse_size(convert["max_shard_size"])
        config = {"dtype": convert["dtype"], "max_shard_bytes": limit}
    context = {"planned": lambda: work}
    stage = replace(stage, needs=Needs.NOTHING)  # not measured
    return mechanism.run(
        stage, gather_foreign, inputs=inputs, config=config, context=context
    ).artifact


def _reference(
    delivery: Delivery,
    mechanism: StageRunner,
    scorer: ReferenceScorer,
    weights: Artifact,
    bases: dict[str, Artifact],
) -> Artifact:
    work, smoke = delivery.work, delivery.settings["smoke"]
    live = None if delivery.witness is None else delivery.witness.measured
    at_live = delivery.source.root / FINGERPRINT
    if delivery.source.kind is Kind.SHARDS and at_live.is_file():
        live = at_live
    inputs = {"model": weights}
    if work.merges:
        inputs = {"model": bases["base"], "adapter": weights}
    config = {
        "texts": probe_texts(smoke["texts"], smoke["probes"]),
        "limit": delivery.probe_tokens,
        "dtype": delivery.dtype,
        "attn_implementation": delivery.attention,
        "quantization": work.choice.quantization,
        "is_reward": work.is_reward,
        "profile": PROFILES[smoke["profile"]],
        "live_digest": hashlib.sha256(live.read_bytes()).hexdigest() if live else "",
        "at_live": live is not None and delivery.witness is None,
    }
    context = {
        "tokenizer": work.tokens.folder,
        "scorer": scorer,
        "live": live.parent if live else None,
    }
    return mechanism.run(
        REFERENCE, reference, inputs=inputs, config=config, context=context
    ).artifact


def _foreign(kind: str, folder: Path) -> Artifact:
    """Return a folder from outside of the store as an artifact, with its own digest."""
    return Artifact(kind, folder, folder_identity(folder))
