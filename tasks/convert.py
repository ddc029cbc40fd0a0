"""convert: `weights` -> `served`, what vLLM and transformers load, with all its parts agreeing.

Tensors change dtype and shards where that is asked for, and are hard links where it is not. The
tokenizer, its template, the generation config and config.json are made to say the same: which ids
end a text, which pads, how many rows there are, which dtype.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.artifact import open_artifact
from tasks.contract import Check, judge
from tasks.errors import ArtifactError, ConfigError
from tasks.fingerprint import Drift, DriftLimit, Fingerprint, drift
from tasks.handoff import (
    CONFIG,
    FINGERPRINT,
    GENERATION_CONFIG,
    copy_files,
    judge_drift,
    measure,
    write_json,
)
from tasks.report import StageReport
from tasks.scoring import ModelRef, Score
from tasks.weights import bits
from tasks.weights.contracts import ModelFacts
from tasks.weights.reader import DTYPE_NAMES, Checkpoint, open_checkpoint, read_json
from tasks.weights.relayout import Layout, Relaid, plan_layout, write_layout
from tasks.weights.tokenizer import TokenizerFacts, read_tokenizer
from tasks.weights.worker import Perform, ask_facts, perform
from tasks.weights.writer import parse_size

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
    perform: Perform = perform,
) -> StageReport:
    """Make a folder that vLLM and transformers load.

    Args:
        out: empty staging directory.
        weights: the `weights` artifact.
        trained: the `shards` artifact, for its tokenizer and its fingerprint.
        dtype: "bfloat16", "float16" or "float32".
        max_shard_size: bound of a file's tensor data: "5GB", "200MiB", or bytes.
        score: who measures fingerprints.
        profile: how far the served model may lie from the trained one.
        log: progress.
        perform: who derives the contract; this process, unless a warm one is given.

    Returns:
        Report of kind `served`. When tensors are the input's, byte for byte, so is the drift: it
        is carried over, and the notes say so.

    Raises:
        ArtifactError: unreadable files, a tokenizer without EOS, a full disk.
        ConfigError: a dtype or a size that is none.
    """
    if dtype not in DTYPE_NAMES:
        raise ConfigError(
            f"convert.dtype={dtype!r} is not one of {', '.join(DTYPE_NAMES)}",
            hint="convert.dtype=bfloat16",
        )
    limit = parse_size(max_shard_size)
    tokenizer = read_tokenizer(trained / "tokenizer")
    facts = ask_facts(perform, weights, dtype)
    with open_checkpoint(weights) as source:
        layout = plan_layout(source, DTYPE_NAMES[dtype], limit)
        log.info("convert: %d files, %d linked", len(layout.shards), len(layout.links))
        relaid = write_layout(source, layout, out)
        checks = _tensor_checks(source, layout, relaid, facts)
        unchanged = _unchanged(weights, layout, relaid)
    _write_side_files(out, weights, trained, tokenizer, dtype)
    checks += _agreement(out, tokenizer, facts, layout)
    notes = {"linked": sorted(layout.links), "drift_carried_over": unchanged}
    metrics = {"tensors": float(len(layout.specs)), "files": float(len(layout.shards))}
    if not all(check.ok for check in checks):
        return StageReport("served", tuple(checks), metrics, notes)
    measured, verdict = _drift(
        out, weights, trained, ModelRef(out, dtype=dtype), score, profile, carry=unchanged
    )
    return StageReport("served", (*checks, verdict), metrics, notes, measured)


def _tensor_checks(
    source: Checkpoint, layout: Layout, relaid: Relaid, facts: ModelFacts
) -> list[Check]:
    # A tied tensor may be stored a second time; then it has to be the same one.
    found = {spec.name: spec for spec in layout.specs if spec.name not in facts.tied}
    checks = judge(facts.tensors, found)
    for name, kept in facts.tied.items():
        if name in source.tensors and kept in source.tensors:
            same = bits.same_bytes(source.raw(name), source.raw(kept))
            checks.append(
                Check(name, f"tied: equal to {kept}", "equal" if same else "other", ok=same)
            )
    checks += [
        Check(f"values of {name}", "finite in the new dtype", f"{count} elements are not", ok=False)
        for name, count in relaid.overflow.items()
    ]
    return checks


def _unchanged(weights: Path, layout: Layout, relaid: Relaid) -> bool:
    """Whether every output tensor is the input's, byte for byte, by its manifest's hashes."""
    if len(layout.links) == len(layout.shards):
        return True
    manifest = open_artifact(weights).manifest()
    known = {
        name: entry["sha256"]
        for entries in manifest["tensors"].values()
        for name, entry in entries.items()
    }
    return all(known.get(name) == digest for name, digest in relaid.sha256.items())


def _write_side_files(
    out: Path, weights: Path, trained: Path, tokenizer: TokenizerFacts, dtype: str
) -> None:
    copy_files(trained / "tokenizer", out)
    pad = tokenizer.eos if tokenizer.pad is None else tokenizer.pad
    stops: int | list[int] = tokenizer.stops
    if len(tokenizer.stops) == 1:
        stops = tokenizer.eos
    generation = read_json(weights / GENERATION_CONFIG)
    write_json(out / GENERATION_CONFIG, {**generation, "eos_token_id": stops, "pad_token_id": pad})
    config = read_json(weights / CONFIG)
    for gone in ("quantization_config", "torch_dtype"):
        config.pop(gone, None)
    write_json(out / CONFIG, {**config, "dtype": dtype, "eos_token_id": stops, "pad_token_id": pad})


def _agreement(
    out: Path, tokenizer: TokenizerFacts, facts: ModelFacts, layout: Layout
) -> list[Check]:
    """Whether what was written agrees with itself: read back, file against file."""
    config, generation = read_json(out / CONFIG), read_json(out / GENERATION_CONFIG)
    shapes = {spec.name: spec.shape for spec in layout.specs}
    rows = shapes.get(facts.embedding, (0,))[0]
    text = config.get("text_config") or config
    served = read_tokenizer(out)
    pad = tokenizer.eos if tokenizer.pad is None else tokenizer.pad
    stops = sorted(_as_list(generation.get("eos_token_id")))
    return [
        _equal("config.json vocab_size", rows, text.get("vocab_size")),
        Check(
            "tokenizer fits the embedding",
            f"at most {rows} ids",
            f"{served.rows} ids",
            ok=served.rows <= rows,
        ),
        _equal("generation_config.json eos_token_id", sorted(tokenizer.stops), stops),
        _equal("config.json eos_token_id", stops, sorted(_as_list(config.get("eos_token_id")))),
        _equal("pad_token_id of both", [pad, pad], [_pad(config), _pad(generation)]),
        _equal("config.json quantization_config", None, config.get("quantization_config")),
        Check(
            "chat template",
            "the trained side's",
            "present" if served.template else "absent",
            ok=bool(served.template) and served.template == tokenizer.template,
        ),
    ]


def _equal(name: str, expected: object, found: object) -> Check:
    return Check(name, str(expected), str(found), ok=expected == found)


def _as_list(value: Any) -> list[int]:
    return list(value) if isinstance(value, list) else [] if value is None else [value]


def _pad(config: Mapping[str, Any]) -> Any:
    return config.get("pad_token_id")


def _drift(
    out: Path,
    weights: Path,
    trained: Path,
    model: ModelRef,
    score: Score,
    profile: DriftLimit,
    *,
    carry: bool,
) -> tuple[Drift, Check]:
    if not carry:
        return measure(score, model, trained=trained, out=out, limit=profile, exact=False)
    earlier = weights / FINGERPRINT
    if not earlier.is_file():
        raise ArtifactError(f"{weights}: no {FINGERPRINT} to carry over")
    shutil.copyfile(earlier, out / FINGERPRINT)
    reference = Fingerprint.load(trained / FINGERPRINT)
    return judge_drift(drift(reference, Fingerprint.load(earlier)), profile)
