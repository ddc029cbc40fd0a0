"""merge: adapter + base -> `weights`, streamed tensor by tensor.

A QLoRA adapter was trained on the *quantised* base, and merging it into the original base gives
another model. `merge.base=dequantized`, the default for QLoRA, merges it into the dequantised base.
A base that is stored in 4 bits is always dequantised.
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
from tasks.weights.quantized.source import Base, PackedCheckpoint, decoding, read_base

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
    """Merge an adapter into its base.

    Args:
        out: empty staging directory.
        adapter: the `adapter` artifact.
        base: the `base` artifact that it was trained on.
        trained: the `shards` artifact, for the base's quantization in training and its fingerprint.
        base_mode: "dequantized" merges into the base as 4-bit training used it, "original" into the
            base on disk; "auto" is "dequantized" if training quantised the base. A base stored in 4
            bits is always "dequantized".
        score: measures fingerprints.
        profile: drift that is allowed between the merged and the trained model.
        log: progress.
        output: `dtype` (torch name) and `max_shard_size` of the stage convert, which then only
            links, and tensors are rounded once. None for training's dtype.
        perform: computes, in this process or in a warm child process.

    Returns:
        Report of kind `weights`.

    Raises:
        ArtifactError: another base, unreadable files, a full disk.
        ConfigError: training does not allow this `base_mode`.
        ContractError: the adapter does not fit the base; the error has all findings.
    """
    source = Trained.read(trained)
    source.require_base(base)
    mode = _mode(base_mode, source, base)
    dtype, limit = _output(output, source)
    weights = read_base(base)
    plan, config = _plan(adapter, weights, base, source, mode, perform)
    # Packed matrices have their own original dtype, which may differ from other tensors'.
    same = dtype == source.dtype and not isinstance(weights, PackedCheckpoint)
    wanted = None if same else DTYPE_NAMES[dtype]
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
    """Return the likely cause of a drift although every checked row is right, and what to type."""
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
    """Return the dtype (torch name) and the bytes per file of the output."""
    if output is None:
        return source.dtype, SHARD_BYTES
    return check_dtype(output["dtype"]), parse_size(output["max_shard_size"])


def choose_mode(base_mode: str, quantization: Mapping[str, Any] | None) -> str:
    """Resolve `merge.base` to "original" or "dequantized". Raises ConfigError.

    Args:
        base_mode: one of `MODES`.
        quantization: quantization of the base in training; None for none.
    """
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
    """Resolve `merge.base` for a base that may be stored in 4 bits. Raises ConfigError."""
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
    """Return the plan and the merged model's config.json.

    Reads headers of the base, and headers and values of the adapter.

    Raises:
        ContractError: the adapter does not fit the base; the error has all findings.
    """
    read = read_adapter(adapter, ADAPTER_INPUT)
    facts = ask_facts(perform, folder, source.dtype)
    settings = _settings(facts, source, base, mode)
    if source.is_reward:
        reward = merged_reward(
            read, base, source.config, settings, dtype=source.dtype, perform=perform,
            endings=read_tokenizer(source.root / "tokenizer").stops,
            normalisation=source.normalisation,
        )  # fmt: skip
        require_values([read])
        return decoding(reward.plan, {BASE_INPUT: base}), reward.config
    merged_changes = changes([(read, 1.0)], facts.live)
    headers = {f"{ADAPTER_INPUT}:{key}": info for key, info in read.tensors.tensors.items()}
    plan = plan_merge(base.tensors, facts, merged_changes, headers, settings)
    require_values([read], merged_changes.copies)
    return decoding(plan, {BASE_INPUT: base}), merged_config(source.config, plan)


def _settings(facts: ModelFacts, source: Trained, base: Base, mode: str) -> MergeSettings:
    """Return the settings that dequantise the base; a packed base needs none."""
    if source.quantization is None or isinstance(base, PackedCheckpoint):
        return MergeSettings()
    check_quantization(source.quantization)
    return MergeSettings(
        quantization={**source.quantization, "loaded_dtype": source.dtype, "base": mode},
        quantized=frozenset(facts.quantized),
    )
