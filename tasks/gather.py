"""gather: the ranks' partitions -> one `adapter` artifact, or one `weights` artifact.

Runs offline, without an accelerator and without torch: names are translated, bytes are stitched.
The contract comes from the model's class on the meta device, so an empty, missing or unexpected
tensor is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.audit.source import ADAPTER_CONFIG
from tasks.core.contract import Check, judge
from tasks.delivery.plan import Work
from tasks.delivery.tokens import write_weights_files
from tasks.drift.fingerprint import EXACT, DriftLimit, ScorePrint
from tasks.drift.verdict import (
    Moved,
    limit_of_scores,
    load_print,
    moved,
    print_in,
    same_arithmetic,
    verdict,
)
from tasks.evaluation.measuring import Measuring, against_engine, stage_report, values_read
from tasks.evaluation.model_folder import Trained
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.pipeline.stage import StageReport
from tasks.process.output import Log
from tasks.weights.files.documents import read_json, write_json
from tasks.weights.files.names import parse_peft
from tasks.weights.files.reader import ADAPTER, WEIGHTS, read_checkpoint
from tasks.weights.files.tensors import Sources, Tensors
from tasks.weights.gather import TRAINED, plan_adapter_file, plan_full, renamed
from tasks.weights.heads import reward_base
from tasks.weights.lora import adapter_contract
from tasks.weights.merge import BASE
from tasks.weights.model import Perform, model_facts, perform
from tasks.weights.plan import Executed, Plan
from tasks.weights.shards import read_partitions
from tasks.weights.write import write

SHARD_BYTES = 5 * 10**9


def gather(
    out: Path,
    *,
    trained: Path,
    base: Path,
    scorer: ReferenceScorer,
    profile: DriftLimit,
    log: Log,
    perform: Perform = perform,
) -> StageReport:
    """Stitch the ranks' partitions into a PEFT adapter or a Hugging Face checkpoint.

    If the contract fails, nothing is written, and the failed checks say why. Raises ArtifactError
    for partitions that do not make full tensors, another base or a full disk, ContractError for
    parameters that have no place in the output.
    """
    source = Trained.read(trained)
    source.require_base(base)
    parts = read_partitions(trained)
    is_adapter = parts.mode == "adapter"
    sources: dict[str, Tensors] = {}
    if is_adapter:
        plan, _ = plan_adapter_file(parts)
        sources[TRAINED] = parts.tensors
        # The adapter of a reward model has the head that its base does not have.
        model_of = trained if source.is_reward else base
        expected = perform(adapter_contract, model_of, trained / ADAPTER_CONFIG, parts.dtype)
    else:
        before = read_checkpoint(base)
        tensors: Tensors = before
        if source.is_reward:
            tensors, _, facts = reward_base(before, source.config, source.dtype, perform)
        else:
            facts = perform(model_facts, base, source.dtype)
        sources[TRAINED] = renamed(parts)
        plan = plan_full(sources[TRAINED], facts, base=tensors, max_shard_bytes=SHARD_BYTES)
        expected = list(facts.tensors)
        if any(op.input == BASE for op in plan.ops):  # buffers, and tensors that no layer uses
            sources[BASE] = before
    checks = judge(expected, {op.name: op for op in plan.ops})
    if not all(check.ok for check in checks):
        return StageReport("adapter" if is_adapter else "weights", tuple(checks))
    source.copy_side_files(out, config=not is_adapter)
    done, values = _write(out, plan, sources, trained / ADAPTER_CONFIG if is_adapter else None, log)
    attention = source.attn_implementation
    return stage_report(
        "adapter" if is_adapter else "weights",
        out,
        plan,
        done,
        [*checks, *values],
        measuring=Live(scorer.measure, trained, profile, attention, scorer=scorer),
        notes={
            "mode": parts.mode,
            "world_size": parts.world_size,
            "quantization": dict(source.quantization) if source.quantization else None,
        },
        # In the dtype of training: the same numbers are expected.
        model=ModelRef(
            base if is_adapter else out,
            out if is_adapter else None,
            source.quantization,
            source.dtype,
            attention,
        ),
    )


_CAUSE = (
    "the stitched weights do not give the training engine's numbers: force=[train], and if it "
    "fails again, report it with this log"
)


@dataclass(frozen=True, kw_only=True)
class Live(Measuring):
    """Compare what was gathered with the live training engine, and make the reference of later.

    The same dtype on the same machine gives the same numbers. The fingerprint in float32, which the
    later stages are compared with, is as far from the engine's as the noise of its format explains.
    """

    scorer: ReferenceScorer  # measures fingerprints

    def take(self, model: ModelRef, out: Path) -> tuple[Moved, tuple[Check, ...]]:
        """Take the fingerprint of `model` into `out`. Returns the drift and its verdicts."""
        path = print_in(self.reference)
        live = load_print(path)
        model = replace(model, device=(live.measured_on or {}).get("device"))
        if isinstance(live, ScorePrint):
            new = self.scorer.measure(model, path, out / path.name)
            assert isinstance(new, ScorePrint)
            same = same_arithmetic(live, new)
            limit = EXACT if same else limit_of_scores(live, new, EXACT)
            drift = moved(live, new)
            return drift, (verdict(drift, limit, live.noise if same else None, cause=_CAUSE),)
        base = model.adapter is not None
        own, apart, check = against_engine(self.scorer, model, path, out, self.limit, base=base)
        if not same_arithmetic(live, own):
            return apart, (check,)
        drift = moved(live, own)
        return drift, (verdict(drift, EXACT, live.noise, cause=_CAUSE), check)


def gather_foreign(
    out: Path,
    *,
    trained: Path,
    planned: Callable[[], Work],
    log: Log,
    base: Path | None = None,
    **_: Any,
) -> StageReport:
    """Gather the partitions of another trainer's ranks, by the plan of a delivery."""
    work = planned()
    plan, config = work.gather, work.adapter_config
    assert plan is not None
    if config is None:
        write_weights_files(out, work, base or trained)
    sources = work.sources if work.trained is None else {TRAINED: work.trained}
    done, checks = _write(out, plan, sources, config, log)
    kind = "weights" if config is None else "adapter"
    return stage_report(kind, out, plan, done, checks, measuring=None)


def _write(
    out: Path, plan: Plan, sources: Sources, adapter_config: Path | None, log: Log
) -> tuple[Executed, list[Check]]:
    """Write the tensors of an adapter (with its configuration) or a model; check their values."""
    log.info("gather: %d tensors", len(plan.ops))
    done = write(plan, sources, out, WEIGHTS if adapter_config is None else ADAPTER, scan=True)
    if adapter_config is not None:
        config = read_json(adapter_config)
        # PEFT writes the target modules in random order.
        if isinstance(config.get("target_modules"), list):
            config["target_modules"] = sorted(config["target_modules"])
        write_json(out / ADAPTER_CONFIG, {**config, "inference_mode": True})
    return done, gathered(plan, done)


def gathered(plan: Plan, done: Executed) -> list[Check]:
    """Check the tensors gathered from partitions: finite, and not every lora_B is all zero."""
    checks = values_read(plan, done)
    keys = {op.name: parse_peft(op.name) for op in plan.ops}
    halves = [name for name, key in keys.items() if key is not None and key.half == "B"]
    if halves:
        # LoRA initialises B with zeros: one stays so if its module saw no data.
        zero = sum(bool(done.tensors[name].all_zero) for name in halves)
        text = f"{zero} of {len(halves)} all zero"
        checks.append(Check("trained lora_B", "not all of them zero", text, zero < len(halves)))
    return checks
