"""merge: adapter + base -> `weights`, streamed tensor by tensor.

A QLoRA adapter was trained on the *quantised* base, and merging it into the original base gives
another model. `merge.base=dequantized`, the default for QLoRA, merges it into the dequantised base.
A base that is stored in 4 bits is always dequantised.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.core.errors import ConfigError
from tasks.drift.fingerprint import PROFILES, DriftLimit
from tasks.evaluation.measuring import Explain, Measuring, stage_report
from tasks.evaluation.model_folder import CONFIG, Trained, write_json
from tasks.evaluation.scoring import ModelRef, Score
from tasks.pipeline.report import StageReport
from tasks.weights.execute.outcome import (
    kept_checks,
    merge_metrics,
    rounding_notes,
    unchanged,
    values_read,
)
from tasks.weights.execute.worker import Perform, perform, write
from tasks.weights.execute.writer import parse_size
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES, check_dtype
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.files.source import Source
from tasks.weights.head_plans import merged_reward
from tasks.weights.lora import Adapter, changes, read_adapter, require_values
from tasks.weights.merge import MergeSettings, merged_config, plan_merge
from tasks.weights.model import Model, model_facts
from tasks.weights.plan import Plan, with_output
from tasks.weights.proof import recompute, recomputed_check
from tasks.weights.quantized.config_fields import is_packed, stored
from tasks.weights.quantized.nf4 import check_quantization
from tasks.weights.quantized.source import Base, PackedCheckpoint, decoding, read_base
from tasks.weights.rounding import Rounding
from tasks.weights.tokens.tokenizer import read_tokenizer

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
    rounding: Rounding = "unbiased",
    perform: Perform = perform,
    explain: Explain | None = None,
) -> StageReport:
    """Merge an adapter into its base.

    Args:
        out: empty staging directory.
        adapter: the `adapter` artifact, with the fingerprint that the output is compared with.
        base: the `base` artifact that it was trained on.
        trained: the `shards` artifact, for the base's quantization in training.
        base_mode: "dequantized" merges into the base as 4-bit training used it, "original" into the
            base on disk; "auto" is "dequantized" if training quantised the base. A base stored in 4
            bits is always "dequantized".
        output: `dtype` (torch name) and `max_shard_size` of the stage convert, which then only
            links, and tensors are rounded once. None for training's dtype.
        rounding: rounding of what the adapter changes; see `weights/rounding.py`.

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
    read = read_adapter(adapter, ADAPTER_INPUT)
    plan, config = _plan(read, weights, base, source, mode, rounding, perform)
    # Packed matrices have their own original dtype, which may differ from other tensors'.
    same = dtype == source.dtype and not isinstance(weights, PackedCheckpoint)
    wanted = None if same else DTYPE_NAMES[dtype]
    plan = with_output(plan, dtype=wanted, max_shard_bytes=limit, files=weights.files)
    source.copy_side_files(out, config=False)
    write_json(out / CONFIG, {**config, "dtype": dtype})
    return write_merged(
        out,
        plan,
        {BASE_INPUT: weights, ADAPTER_INPUT: read.tensors},
        notes={"merge_base": mode},
        measuring=Measuring(
            score,
            adapter,
            profile,
            source.attn_implementation,
            cause=_cause(mode, source),
            before=ModelRef(
                base, adapter, source.quantization, source.dtype, source.attn_implementation
            ),
            explain=explain,
        ),
        perform=perform,
        log=log,
    )


def write_merged(
    out: Path,
    plan: Plan,
    sources: Mapping[str, Source],
    *,
    log: Log,
    notes: Mapping[str, Any] | None = None,
    measuring: Measuring | None = None,
    perform: Perform = perform,
) -> StageReport:
    """Write the tensors of a merged model, and recompute sampled rows of each from the inputs."""
    folded = sum(bool(op.terms) for op in plan.ops)
    log.info("merge: %d of %d tensors change", folded, len(plan.ops))
    done = perform(write, plan, sources, out)
    if warning := unchanged(done):
        log.warning("merge: %s", warning)
    limit = measuring.limit if measuring is not None else PROFILES["standard"]
    recomputed = perform(recompute, plan, sources, read_checkpoint(out))
    checks = [*values_read(plan, done), *kept_checks(plan, done, limit.kept)]
    notes = {
        "plan": plan.as_json(),
        **rounding_notes(plan, done),
        **(notes or {}),
    }
    return stage_report(
        "weights",
        out,
        plan,
        done,
        [*checks, recomputed_check(recomputed)],
        measuring=measuring,
        metrics=merge_metrics(plan, done),
        notes=notes,
    )


def _cause(mode: str, source: Trained) -> str:
    """Return the likely cause of a drift although every checked row is right, and what to type."""
    if mode == "original" and source.quantization is not None:
        return (
            "the adapter was trained on the base in 4 bits and merged into the one in 16: "
            "merge.base=auto"
        )
    return (
        "every sampled row is base + adapter, so rounding took it away: convert.dtype=float32 "
        "rounds nothing"
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
    read: Adapter,
    base: Base,
    folder: Path,
    source: Trained,
    mode: str,
    rounding: Rounding,
    perform: Perform,
) -> tuple[Plan, Mapping[str, Any]]:
    """Return the plan and the merged model's config.json.

    Reads headers of the base, and headers and values of the adapter.

    Raises:
        ContractError: the adapter does not fit the base; the error has all findings.
    """
    facts = perform(model_facts, folder, source.dtype)
    settings = replace(_settings(facts, source, base, mode), rounding=rounding)
    if source.is_reward:
        reward = merged_reward(
            read, base, source.config, settings, dtype=source.dtype, perform=perform,
            endings=read_tokenizer(source.root / "tokenizer").stops,
            normalisation=source.normalisation,
        )  # fmt: skip
        require_values([read])
        return decoding(reward.plan, {BASE_INPUT: base}), reward.config
    plan, config = plan_adapters([(read, 1.0)], base, facts, source.config, settings)
    return decoding(plan, {BASE_INPUT: base}), config


def plan_adapters(
    adapters: Sequence[tuple[Adapter, float]],
    base: Source,
    facts: Model,
    config: Mapping[str, Any],
    settings: MergeSettings,
) -> tuple[Plan, dict[str, Any]]:
    """Plan the merge of weighted adapters; their inputs are called as they are.

    Args:
        base: the base; its input is "base".
        settings: dtype and quantization.

    Returns:
        The plan, and config.json of the merged model.

    Raises:
        ContractError: the adapters do not fit the base; the error has all findings.
    """
    opened = [adapter for adapter, _ in adapters]
    changed = changes(adapters, facts)
    headers = {
        f"{adapter.name}:{key}": info
        for adapter in opened
        for key, info in adapter.tensors.tensors.items()
    }
    plan = plan_merge(base.tensors, facts, changed, headers, settings)
    require_values(opened, changed.copies)
    return plan, merged_config(config, plan)


def _settings(facts: Model, source: Trained, base: Base, mode: str) -> MergeSettings:
    """Return the settings that dequantise the base; a packed base needs none."""
    if source.quantization is None or isinstance(base, PackedCheckpoint):
        return MergeSettings()
    check_quantization(source.quantization)
    return MergeSettings(
        quantization={**source.quantization, "loaded_dtype": source.dtype, "base": mode},
        quantized=frozenset(facts.quantized),
    )
