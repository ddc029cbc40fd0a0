"""convert: `weights` -> `served`, a folder that vLLM and transformers load.

Tensors change their dtype and files if the settings say so; otherwise they are hard links. The
tokenizer, its template, the generation config and config.json are made consistent: the ids that end
a text, the padding id, the number of rows, the dtype.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.contract import Check, Expected, judge
from tasks.drift.fingerprint import DriftLimit
from tasks.drift.verdict import Moved
from tasks.evaluation.scoring import ModelRef, Score
from tasks.evaluation.serving_config import ServingConfig, agreement, write_configs
from tasks.evaluation.trained_artifact import (
    CONFIG,
    GENERATION_CONFIG,
    Trained,
    carry_over,
    copy_files,
    measure,
)
from tasks.pipeline.report import StageReport
from tasks.weights.execute.execute import Executed, execute
from tasks.weights.execute.worker import (
    Perform,
    ask_execute,
    ask_facts,
    ask_quantization_config,
    perform,
)
from tasks.weights.execute.writer import parse_size
from tasks.weights.files.opening import SourceRef
from tasks.weights.files.reader import (
    DTYPE_NAMES,
    WEIGHTS,
    Checkpoint,
    check_dtype,
    read_checkpoint,
    read_json,
)
from tasks.weights.files.tokenizer import TokenizerFacts, read_tokenizer
from tasks.weights.heads.normalisation import Normalisation
from tasks.weights.heads.reward import reward_config
from tasks.weights.plan.layout import as_is, with_output
from tasks.weights.plan.operations import Plan
from tasks.weights.plan.validate import validate
from tasks.weights.quantized.quantize import (
    NONE,
    check_quantize,
    left_alone,
    quantized_contract,
    quantized_plan,
)

Log = logging.Logger | logging.LoggerAdapter[Any]


def convert(
    out: Path,
    *,
    weights: Path,
    trained: Path,
    dtype: str,
    max_shard_size: str | int,
    score: Score,
    profile: DriftLimit,
    log: Log,
    quantize: str = NONE,
    perform: Perform = perform,
) -> StageReport:
    """Write a folder that vLLM and transformers load.

    Args:
        out: empty staging directory.
        weights: the `weights` artifact.
        trained: the `shards` artifact, for its tokenizer and its fingerprint.
        dtype: "bfloat16", "float16" or "float32".
        max_shard_size: largest tensor data of a file: "5GB", "200MiB", or bytes.
        score: measures fingerprints.
        profile: drift that is allowed between the served and the trained model.
        log: progress.
        quantize: "none", or 8 bits for linear layers: "w8a8", "fp8"; see
            `weights/quantized/quantize.py`.
        perform: derives the contract and quantises, in this process or in a warm child process.

    Returns:
        Report of kind `served`. If all tensors are byte-identical to the input's, the input's drift
        is carried over, and the notes say so.

    Raises:
        ArtifactError: unreadable files, a tokenizer without EOS, a full disk.
        ConfigError: an unknown dtype, size or quantisation.
        ContractError: this model cannot be quantised in this way.
    """
    check_dtype(dtype)
    limit, scheme = parse_size(max_shard_size), check_quantize(quantize)
    tokenizer = read_tokenizer(trained / "tokenizer")
    facts = ask_facts(perform, weights, dtype)
    source = read_checkpoint(weights)
    plan = with_output(
        as_is(source), dtype=DTYPE_NAMES[dtype], max_shard_bytes=limit, files=source.files
    )
    if scheme is not None:
        plan = quantized_plan(plan, facts, scheme)
    validate(plan, {WEIGHTS: source})
    if scheme is None:
        done = execute(plan, {WEIGHTS: source}, out)
    else:  # needs torch
        done = ask_execute(perform, plan, {WEIGHTS: SourceRef(weights)}, out)
    contract = facts.tensors if scheme is None else quantized_contract(facts, scheme)
    checks = _tensor_checks(source, plan, done, facts.tied, contract)
    unchanged = all(source.checksum(op.key) == done.checksums[op.name] for op in plan.ops)
    log.info("convert: %d tensors, %d files linked", len(plan.ops), len(done.linked))
    copy_files(trained / "tokenizer", out)
    side = Trained.read(trained)
    config, pad = _config_and_pad(weights, side, tokenizer)
    serving = ServingConfig(
        config=config,
        generation=read_json(weights / GENERATION_CONFIG),
        dtype=dtype,
        stops=tokenizer.stops,
        pad=pad,
        tokenizer=tokenizer,
        template=not side.texts,
        quantized=ask_quantization_config(perform, scheme, left_alone(facts)) if scheme else None,
    )
    write_configs(out, serving)
    checks += agreement(out, serving, facts, plan)
    notes = {"linked": sorted(done.linked), "drift_carried_over": unchanged}
    files = {outcome.file for outcome in done.outcomes.values()}
    metrics = {"tensors": float(len(plan.ops)), "files": float(len(files))}
    if not all(check.ok for check in checks):
        return StageReport("served", tuple(checks), metrics, notes)
    model = ModelRef(out, dtype=dtype, attn_implementation=side.attn_implementation)
    measured, verdict = _drift(out, weights, trained, model, score, profile, carry=unchanged)
    return StageReport("served", (*checks, verdict), metrics, notes, measured)


def _config_and_pad(
    weights: Path, side: Trained, tokenizer: TokenizerFacts
) -> tuple[dict[str, Any], int | None]:
    """Return config.json (without the fields of the output's tensors) and the padding id.

    A reward model reads its score at the last token that is not padding, so a token that ends its
    texts must not be the padding token.
    """
    config = read_json(weights / CONFIG)
    pad = tokenizer.eos if tokenizer.pad is None else tokenizer.pad
    if not side.is_reward:
        return config, pad
    how = side.normalisation or Normalisation()
    config = reward_config(config, config["architectures"][0], how, tokenizer.stops)
    return config, None if pad in tokenizer.stops else pad


def _tensor_checks(
    source: Checkpoint,
    plan: Plan,
    done: Executed,
    tied: Mapping[str, str],
    contract: Sequence[Expected],
) -> list[Check]:
    # A tied tensor may be stored a second time; then both have to be equal.
    checks = judge(contract, {op.name: op for op in plan.ops if op.name not in tied})
    for name, stored in tied.items():
        if name in source.tensors and stored in source.tensors:
            same = done.checksums[name] == done.checksums[stored]
            checks.append(
                Check(name, f"tied: equal to {stored}", "equal" if same else "other", ok=same)
            )
    checks += [
        Check(f"values of {name}", "finite in the new dtype", f"{count} elements are not", ok=False)
        for name, count in done.nonfinite.items()
    ]
    return checks


def _drift(
    out: Path,
    weights: Path,
    trained: Path,
    model: ModelRef,
    score: Score,
    profile: DriftLimit,
    *,
    carry: bool,
) -> tuple[Moved, Check]:
    if carry:
        return carry_over(weights, trained=trained, out=out, limit=profile)
    return measure(score, model, trained=trained, out=out, limit=profile, exact=False)
