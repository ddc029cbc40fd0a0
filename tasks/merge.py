"""merge: adapter + base -> `weights`, streamed tensor by tensor.

    planned = plan_adapters(adapters, base, config, ...)    from headers; `deliver` calls it, too
    write_merged(out, planned.plan, planned.sources, ...)   write, and recompute sampled rows

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
from tasks.drift.fingerprint import PROFILES, DriftLimit
from tasks.evaluation.measuring import Explain, Measuring, stage_report
from tasks.evaluation.model_folder import CONFIG, Trained, write_json
from tasks.evaluation.scoring import ModelRef, Score
from tasks.pipeline.report import StageReport
from tasks.weights.files.documents import read_json
from tasks.weights.files.dtypes import DTYPE_NAMES, check_dtype
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.files.tensors import Sources
from tasks.weights.lora import read_adapter
from tasks.weights.merge import Reward, plan_adapters
from tasks.weights.perform import Perform, perform
from tasks.weights.plan import Plan
from tasks.weights.proof import recompute, recomputed_check
from tasks.weights.quantized.config_fields import is_decodable, is_packed, stored
from tasks.weights.quantized.nf4 import check_quantization
from tasks.weights.rounding import Rounding
from tasks.weights.tokens.tokenizer import read_tokenizer
from tasks.weights.write import parse_size, write
from tasks.weights.written import (
    kept_checks,
    merge_metrics,
    rounding_notes,
    unchanged,
    values_read,
)

Log = logging.Logger | logging.LoggerAdapter[Any]

ADAPTER = "adapter"
"""Name of the adapter in plans."""
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
    stored_as = read_json(base / CONFIG)
    packed = is_packed(stored_as)
    mode, quantization = _mode(base_mode, source, base, packed=packed), source.quantization
    if quantization is not None and not packed:
        check_quantization(quantization)
        quantization = {**quantization, "loaded_dtype": source.dtype, "base": mode}
    dtype, limit = source.dtype, SHARD_BYTES
    if output is not None:
        dtype, limit = check_dtype(output["dtype"]), parse_size(output["max_shard_size"])
    planned = plan_adapters(
        [(read_adapter(adapter, ADAPTER), 1.0)],
        base,
        source.config,
        model_dtype=source.dtype,
        # Packed matrices have their own original dtype, which may differ from other tensors'.
        dtype=None if dtype == source.dtype and not is_decodable(stored_as) else DTYPE_NAMES[dtype],
        max_shard_bytes=limit,
        quantization=None if packed else quantization,
        rounding=rounding,
        reward=_reward_of(source) if source.is_reward else None,
        perform=perform,
    )
    source.copy_side_files(out, config=False)
    write_json(out / CONFIG, {**planned.config, "dtype": dtype})
    attention = source.attn_implementation
    return write_merged(
        out,
        planned.plan,
        planned.sources,
        notes={"merge_base": mode},
        measuring=Measuring(
            score,
            adapter,
            profile,
            attention,
            cause=_cause(mode, source),
            before=ModelRef(base, adapter, source.quantization, source.dtype, attention),
            explain=explain,
        ),
        perform=perform,
        log=log,
    )


def _reward_of(source: Trained) -> Reward:
    return Reward(read_tokenizer(source.root / "tokenizer").stops, source.normalisation)


def write_merged(
    out: Path,
    plan: Plan,
    sources: Sources,
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
    return stage_report(
        "weights",
        out,
        plan,
        done,
        [*checks, recomputed_check(recomputed)],
        measuring=measuring,
        metrics=merge_metrics(plan, done),
        notes={**rounding_notes(plan, done), **(notes or {})},
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


def _mode(base_mode: str, source: Trained, base: Path, *, packed: bool) -> str:
    """Resolve `merge.base` to "original" or "dequantized". Raises ConfigError."""
    if base_mode not in MODES:
        raise ConfigError(
            f"merge.base={base_mode!r} is not one of {', '.join(MODES)}", hint="merge.base=auto"
        )
    if packed and base_mode == "original":
        how = stored(read_json(base / CONFIG))
        raise ConfigError(
            f"merge.base=original, but {base} is stored quantised ({how}): "
            "these bits are all there is",
            hint="merge.base=auto",
        )
    if not packed and base_mode == "dequantized" and source.quantization is None:
        raise ConfigError(
            "merge.base=dequantized, but training did not quantise the base",
            hint="merge.base=original, or merge.base=auto",
        )
    if base_mode == "auto":
        return "dequantized" if packed or source.quantization is not None else "original"
    return base_mode
