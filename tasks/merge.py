"""merge: adapter + base -> `weights`, streamed tensor by tensor.

A QLoRA adapter was trained on the *quantised* base. Folding it into the original base gives another
model; `merge.base=dequantized`, the default there, folds it into the base as training saw it. Of a
base that is stored in 4 bits already there is no other: it is decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError
from tasks.drift.fingerprint import DriftLimit
from tasks.evaluation.scoring import ModelRef, Score
from tasks.evaluation.trained_artifact import CONFIG, Trained, measure, write_json
from tasks.pipeline.report import StageReport
from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.read import read_adapter
from tasks.weights.adapters.values import require_values
from tasks.weights.execute.verdicts import merge_metrics, merged, quantization_notes
from tasks.weights.execute.worker import Perform, ask_execute, ask_facts, ask_recompute, perform
from tasks.weights.execute.writer import parse_size
from tasks.weights.families.merging import MergeSettings, merged_config, plan_merge
from tasks.weights.files.opening import SourceRef
from tasks.weights.files.reader import ADAPTER, DTYPE_NAMES, check_dtype, read_json
from tasks.weights.files.tokenizer import read_tokenizer
from tasks.weights.heads.merging import merged_reward
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.plan.layout import with_output
from tasks.weights.plan.operations import Plan
from tasks.weights.proof.recheck import recomputed_check
from tasks.weights.quantized.config_fields import is_packed, stored
from tasks.weights.quantized.nf4 import check_quantization
from tasks.weights.quantized.plans import decoding
from tasks.weights.quantized.source import Base, PackedCheckpoint, open_base

Log = logging.Logger | logging.LoggerAdapter[Any]

BASE_INPUT, ADAPTER_INPUT = "base", "adapter"
SHARD_BYTES = 5 * 10**9
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
    output: Mapping[str, Any] | None = None,
    perform: Perform = perform,
) -> StageReport:
    """Fold an adapter into its base.

    Args:
        out: empty staging directory.
        adapter: the `adapter` artifact.
        base: the `base` artifact it was trained from.
        trained: the `shards` artifact: what training did to the base, and its fingerprint.
        base_mode: "dequantized" folds into the base as 4-bit training saw it, "original" into the
            base on disk; "auto" is dequantized when training quantised. A base stored in 4 bits is
            always "dequantized".
        score: who measures fingerprints.
        profile: how far the merged model may lie from the trained one.
        log: progress.
        output: `dtype` (torch name) and `max_shard_size` of what convert is to make next: it then
            has nothing left to write, and the tensors are rounded once. None for training's dtype.
        perform: who computes; this process, unless a warm one is given.

    Raises:
        ArtifactError: another base, unreadable files, a full disk.
        ConfigError: a `base_mode` that training rules out.
        ContractError: an adapter that does not fit the base, every finding in one error.
    """
    source = Trained.read(trained)
    source.require_base(base)
    mode = _mode(base_mode, source, base)
    dtype, limit = _output(output, source)
    with open_base(base) as weights:
        plan, config = _plan(adapter, weights, base, source, mode, perform)
        # Packed matrices were packed from a dtype of their own, which need not be the others'.
        kept = dtype == source.dtype and not isinstance(weights, PackedCheckpoint)
        wanted = None if kept else DTYPE_NAMES[dtype]
        plan = with_output(plan, dtype=wanted, max_shard_bytes=limit, files=weights.files)
    folded = sum(bool(op.terms) for op in plan.ops)
    log.info("merge: %d of %d tensors into the %s base", folded, len(plan.ops), mode)
    inputs = {BASE_INPUT: SourceRef(base, "base"), ADAPTER_INPUT: SourceRef(adapter, stem=ADAPTER)}
    done = ask_execute(perform, plan, inputs, out)
    source.copy_side_files(out, config=False)
    write_json(out / CONFIG, {**config, "dtype": dtype})
    checks = [merged(op, done.outcomes[op.name]) for op in plan.ops]
    checks.append(recomputed_check(ask_recompute(perform, plan, inputs, out)))
    notes = {"merge_base": mode, "plan": plan.as_json(), **quantization_notes(done)}
    metrics = merge_metrics(plan, done)
    if not all(check.ok for check in checks):
        return StageReport("weights", tuple(checks), metrics, notes)
    model = ModelRef(out, dtype=dtype, attn_implementation=source.attn_implementation)
    measured, verdict = measure(
        score, model, trained=trained, out=out, limit=profile, exact=False,
        cause=_cause(mode, source),
    )  # fmt: skip
    return StageReport("weights", (*checks, verdict), metrics, notes, measured)


def _cause(mode: str, source: Trained) -> str:
    """Why a merge that is right in every sampled row may give another model, and what to type."""
    if mode == "original" and source.quantization is not None:
        return (
            "the adapter was trained on the base in 4 bits and merged into the one in 16: "
            "merge.base=auto"
        )
    return (
        "every sampled row is base + adapter, so rounding or the training engine's own fingerprint "
        "differs: convert.dtype=float32 rules out rounding"
    )


def _output(output: Mapping[str, Any] | None, source: Trained) -> tuple[str, int]:
    """dtype (torch name) and bytes a file of what is written."""
    if output is None:
        return source.dtype, SHARD_BYTES
    return check_dtype(output["dtype"]), parse_size(output["max_shard_size"])


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


def _mode(base_mode: str, source: Trained, base: Path) -> str:
    """The same for this base. Raises ConfigError."""
    config = read_json(base / CONFIG)
    if not is_packed(config):
        return choose_mode(base_mode, source.quantization)
    if choose_mode(base_mode, {}) == "original":
        raise ConfigError(
            f"merge.base=original, but {base} is stored quantised ({stored(config)}): "
            "these bits are all there is",
            hint="merge.base=auto",
        )
    return "dequantized"


def _plan(
    adapter: Path, base: Base, folder: Path, source: Trained, mode: str, perform: Perform
) -> tuple[Plan, Mapping[str, Any]]:
    """The plan and the merged model's config.json; reads headers, and the adapter's numbers.

    Raises:
        ContractError: the adapter does not fit, every finding in one error.
    """
    read = read_adapter(adapter, ADAPTER_INPUT)
    facts = ask_facts(perform, folder, source.dtype)
    settings = _settings(facts, source, base, mode)
    if source.is_reward:
        parted = merged_reward(
            read, base, source.config, settings, dtype=source.dtype, perform=perform,
            endings=read_tokenizer(source.root / "tokenizer").stops,
            normalisation=source.normalisation,
        )  # fmt: skip
        require_values([read])
        return decoding(parted.plan, {BASE_INPUT: base}), parted.config
    found = changes([(read, 1.0)], facts.live)
    held = {f"{ADAPTER_INPUT}:{key}": info for key, info in read.tensors.tensors.items()}
    plan = plan_merge(base.tensors, facts, found, held, settings)
    require_values([read], found.copies)
    return decoding(plan, {BASE_INPUT: base}), merged_config(source.config, plan)


def _settings(facts: ModelFacts, source: Trained, base: Base, mode: str) -> MergeSettings:
    """How the base enters: with the 4 bits that training held it in, where it has them to get."""
    if source.quantization is None or isinstance(base, PackedCheckpoint):
        return MergeSettings()
    check_quantization(source.quantization)
    return MergeSettings(
        quantization={**source.quantization, "loaded_dtype": source.dtype, "base": mode},
        quantized=frozenset(facts.quantized),
    )
