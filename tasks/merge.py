"""merge: adapter + base -> `weights`, streamed tensor by tensor.

A QLoRA adapter was trained on the *quantised* base. Folding it into the original base gives another
model; `merge.base=dequantized`, the default there, folds it into the base as training saw it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.contract import Check, judge
from tasks.errors import ConfigError, ContractError
from tasks.fingerprint import DriftLimit
from tasks.handoff import Trained, measure
from tasks.report import StageReport
from tasks.scoring import ModelRef, Score
from tasks.weights import bits
from tasks.weights.contracts import ModelFacts
from tasks.weights.merge_plan import BaseUse, MergeOp, MergePlan, plan_merge
from tasks.weights.merge_run import MergeResult
from tasks.weights.nf4 import check_quantization
from tasks.weights.reader import ADAPTER, open_checkpoint, read_json
from tasks.weights.worker import Perform, ask_facts, ask_merge, perform

Log = logging.Logger | logging.LoggerAdapter[Any]

MODES = ("auto", "dequantized", "original")


def merge(
    out: Path,
    *,
    adapter: Path,
    base: Path,
    trained: Path,
    base_mode: str,
    score: Score,
    profile: DriftLimit,
    log: Log,
    perform: Perform = perform,
) -> StageReport:
    """Fold an adapter into its base.

    Args:
        out: empty staging directory.
        adapter: the `adapter` artifact.
        base: the `base` artifact it was trained from.
        trained: the `shards` artifact: what training did to the base, and its fingerprint.
        base_mode: "dequantized" folds into the base as 4-bit training saw it, "original" into the
            base on disk; "auto" is dequantized when training quantised.
        score: who measures fingerprints.
        profile: how far the merged model may lie from the trained one.
        log: progress.
        perform: who computes; this process, unless a warm one is given.

    Raises:
        ArtifactError: another base, unreadable files, a full disk.
        ConfigError: a `base_mode` that training rules out.
        ContractError: an adapter that does not fit the base, every finding in one error.
    """
    source = Trained.read(trained)
    source.require_base(base)
    mode = choose_mode(base_mode, source.quantization)
    facts = ask_facts(perform, base, source.dtype)
    plan, quantized = _plan(adapter, base, facts, source, mode)
    folded = sum(op.kind == "fold" for op in plan.ops)
    log.info("merge: %d of %d tensors into the %s base", folded, len(plan.ops), mode)
    result = ask_merge(perform, plan, base=base, adapter=adapter, out=out, quantized=quantized)
    source.copy_side_files(out, config=True)
    checks = list(_verify(out, base, plan, result))
    notes = _notes(plan, result, mode)
    metrics = {"tensors": float(len(plan.ops)), "folded": float(folded)}
    if result.overall_error is not None:
        metrics["quantization_error"] = result.overall_error
    if not all(check.ok for check in checks):
        return StageReport("weights", tuple(checks), metrics, notes)
    model = ModelRef(out, dtype=source.dtype)
    measured, verdict = measure(score, model, trained=trained, out=out, limit=profile, exact=False)
    return StageReport("weights", (*checks, verdict), metrics, notes, measured)


def choose_mode(base_mode: str, quantization: Mapping[str, Any] | None) -> str:
    """What `merge.base` means for this training. Raises ConfigError."""
    if base_mode not in MODES:
        raise ConfigError(
            f"merge.base={base_mode!r} is not one of {', '.join(MODES)}", hint="merge.base=auto"
        )
    if base_mode == "dequantized" and quantization is None:
        raise ConfigError(
            "merge.base=dequantized, but training did not quantise the base",
            hint="merge.base=original, or merge.base=auto",
        )
    if base_mode == "auto":
        return "original" if quantization is None else "dequantized"
    return base_mode


def _plan(
    adapter: Path, base: Path, facts: ModelFacts, source: Trained, mode: str
) -> tuple[MergePlan, frozenset[str]]:
    """The plan, and the keys that training quantised. Reads headers only."""
    quantized = frozenset(facts.quantized if source.quantization is not None else ())
    if source.quantization is not None:
        check_quantization(source.quantization)
    use = BaseUse(quantized, source.quantization, mode == "dequantized", source.dtype)
    config = read_json(adapter / "adapter_config.json")
    with open_checkpoint(base) as weights, open_checkpoint(adapter, ADAPTER) as lora:
        held = {name: info for name, info in weights.tensors.items() if name not in facts.tied}
        wanted = [replace(one, dtype=None) for one in facts.tensors]
        misfits = [c for c in judge(wanted, held) if not c.ok]
        if misfits:
            raise ContractError(
                f"merge: the base is not what its config.json says: {misfits[0].name}: "
                f"expected {misfits[0].expected}, found {misfits[0].found}",
                details=[f"{c.name}: expected {c.expected}, found {c.found}" for c in misfits],
            )
        plan = plan_merge(weights.tensors, lora.tensors, config, use)
    tied = sorted(
        op.name
        for op in plan.ops
        if op.kind == "fold" and op.name in {*facts.tied, *facts.tied.values()}
    )
    if tied:
        raise ContractError(
            f"merge: {tied[0]} is tied to another tensor and cannot be changed alone",
            details=tied,
            hint="train without it: leave it out of peft.target_modules",
        )
    return plan, quantized


def _verify(out: Path, base: Path, plan: MergePlan, result: MergeResult) -> Iterator[Check]:
    """One check a tensor, of what lies on disk now."""
    with open_checkpoint(out) as merged, open_checkpoint(base) as original:
        for op in plan.ops:
            bad = result.nonfinite.get(op.name, 0)
            if bad:
                yield Check(op.name, "finite", f"{bad} elements not finite", ok=False)
            elif op.kind == "copy":
                same = bits.same_bytes(merged.raw(op.name), original.raw(op.name))
                yield Check(op.name, "as in the base", "identical" if same else "other", ok=same)
            else:
                intact = hashlib.sha256(merged.raw(op.name)).hexdigest() == result.sha256[op.name]
                yield _computed_check(op, result, intact=intact)


def _computed_check(op: MergeOp, result: MergeResult, *, intact: bool) -> Check:
    if not intact:
        return Check(op.name, "on disk what was computed", "other bytes", ok=False)
    if op.kind == "dequantize":
        return Check(op.name, "as in the dequantised base", "identical", ok=True)
    changed = result.changed[op.name]
    return Check(
        op.name, "changed by the adapter", f"{changed:.2%} of elements changed", ok=changed > 0
    )


def _notes(plan: MergePlan, result: MergeResult, mode: str) -> dict[str, Any]:
    notes: dict[str, Any] = {"merge_base": mode, "plan": plan.as_json()}
    if result.quantization_error:
        worst = max(result.quantization_error, key=lambda name: result.quantization_error[name])
        notes["quantization_error"] = {
            "meaning": "|W - dequantised W| / |scale B A|, Frobenius norms",
            "overall": result.overall_error,
            "max": result.quantization_error[worst],
            "max_at": worst,
            "by_tensor": result.quantization_error,
        }
    return notes
