"""merge: adapter + base -> `weights`, streamed tensor by tensor.

    planned = plan_adapters(adapters, base, config, ...)    from headers; `deliver` calls it, too
    write_merged(out, planned.plan, planned.sources, ...)   write, and recompute sampled rows

A QLoRA adapter was trained on the *quantised* base, and merging it into the original base gives
another model. `merge.base=dequantized`, the default for QLoRA, merges it into the dequantised base.
A base that is stored in 4 bits is always dequantised.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from tasks.weights.files.reader import WEIGHTS, files_of, read_checkpoint
from tasks.weights.files.tensors import Sources, Tensors
from tasks.weights.head_plans import Parted, merged_reward
from tasks.weights.heads import Normalisation
from tasks.weights.lora import Adapter, changes, read_adapter, require_values
from tasks.weights.merge import MergeSettings, merged_config, plan_merge
from tasks.weights.model import model_facts
from tasks.weights.plan import Plan, with_output
from tasks.weights.quantized.config_fields import is_decodable, is_packed, stored
from tasks.weights.quantized.nf4 import check_quantization
from tasks.weights.quantized.source import decoding, open_model
from tasks.weights.recompute import recompute, recomputed_check
from tasks.weights.rounding import Rounding
from tasks.weights.tokens.tokenizer import read_tokenizer

Log = logging.Logger | logging.LoggerAdapter[Any]

BASE, ADAPTER = "base", "adapter"
"""Names of the inputs in plans."""
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


@dataclass(frozen=True)
class Reward:
    """Facts of a reward model that its adapter does not have."""

    endings: Sequence[int] = ()  # ids that end its texts
    # mean and standard deviation of its scores; None for those beside the adapter or the base
    normalisation: Normalisation | None = None


def _reward_of(source: Trained) -> Reward:
    return Reward(read_tokenizer(source.root / "tokenizer").stops, source.normalisation)


def plan_adapters(
    adapters: Sequence[tuple[Adapter, float]],
    base: Path,
    config: Mapping[str, Any],
    *,
    model_dtype: str,
    dtype: str | None,
    max_shard_bytes: int,
    quantization: Mapping[str, Any] | None = None,
    rounding: Rounding = "unbiased",
    reward: Reward | None = None,
    perform: Perform = perform,
) -> Parted:
    """Plan the merge of weighted adapters into the base, in the dtype and files of the output.

    Reads headers of the base, and headers and values of the adapters.

    Args:
        config: config.json of the base, decoded.
        model_dtype: torch name of the dtype in which the model's class is built.
        dtype: safetensors name for all floats; None keeps the dtype of each tensor.
        quantization: 4 bits that the base goes through, as `Op.quantization`; None for none.
        reward: of a reward model, which has a single adapter; None for a language model.

    Raises:
        ContractError: the adapters do not fit the base; the error has all findings.
    """
    opened, facts = open_model(base), perform(model_facts, base, model_dtype)
    quantized = frozenset() if quantization is None else frozenset(facts.quantized)
    settings = MergeSettings(dtype, quantization, quantized, base=BASE, rounding=rounding)
    read = [adapter for adapter, _ in adapters]
    if reward is not None:
        planned = merged_reward(
            read[0],
            opened,
            config,
            settings,
            dtype=model_dtype,
            endings=reward.endings,
            normalisation=reward.normalisation,
            perform=perform,
        )
        require_values(read)
    else:
        total = changes(adapters, facts)
        headers = {f"{a.name}:{key}": info for a in read for key, info in a.tensors.items()}
        plan = plan_merge(opened, facts, total, headers, settings)
        require_values(read, total.copies)
        sources = {BASE: opened, **{adapter.name: adapter.tensors for adapter in read}}
        planned = Parted(plan, sources, merged_config(config, plan), facts)
    return replace(planned, plan=in_files(planned.plan, opened, max_shard_bytes))


def in_files(plan: Plan, source: Tensors, max_shard_bytes: int, dtype: str | None = None) -> Plan:
    """Return the plan with the files of its input, if they fit, and packed matrices decoded.

    Args:
        source: input of most operations.
        dtype: safetensors name for all floats; None keeps those of the plan.
    """
    plan = decoding(plan, {BASE: source, WEIGHTS: source})
    files = files_of(source)
    return with_output(plan, dtype=dtype, max_shard_bytes=max_shard_bytes, files=files)


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
