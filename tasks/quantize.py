"""quantize: `served` -> a second `served` folder, with fewer bits, or for llama.cpp.

The folder in 16 bits stays as it is; the quantised one is a hand-off of its own, with its own
contract, manifest and drift limit. Its layers are also compared one by one on training rows, so
that a refusal names the layer that lost most. `smoke_eval` then serves both folders.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from tasks.core.contract import Check, judge
from tasks.core.errors import ConfigError, DataError
from tasks.core.files import copy_file
from tasks.drift.fingerprint import DriftLimit, Fingerprint
from tasks.evaluation.measuring import Measuring, values_read
from tasks.evaluation.model_folder import CONFIG, dtype_of
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.pipeline.stage import CONTRACT, StageReport
from tasks.process.launch import launch
from tasks.process.output import Log
from tasks.serving.llama_cpp import find_programs
from tasks.serving.prompts import chat
from tasks.serving.reference.requests import layer_errors
from tasks.weights.files.documents import MANIFEST, read_json, write_json
from tasks.weights.files.reader import WEIGHTS, read_checkpoint
from tasks.weights.files.tensors import size_of
from tasks.weights.model import model_facts
from tasks.weights.plan import as_is
from tasks.weights.quantized.quantize import (
    GGUF,
    left_alone,
    library_config,
    quantized_contract,
    quantized_plan,
)
from tasks.weights.write import parse_size, write
from tasks.witness.plumbline_witness.prints import FINGERPRINT

CONVERTED = ("f16", "bf16", "q8_0")
"""Types of GGUF that llama.cpp's converter writes; its quantiser makes all others from bf16."""
TRAINING_ROWS = "train.jsonl"
HELDOUT_ROWS = "heldout.jsonl"
ROW_TOKENS = 512
"""Maximum number of tokens of a row."""
_SHOWN = 10
"""Layers that the manifest names."""


def quantize(
    out: Path,
    *,
    served: Path,
    reference: Path,
    scheme: str,
    max_shard_size: str | int,
    rows: int,
    profile: DriftLimit,
    scorer: ReferenceScorer,
    log: Log,
    log_path: Path,
    data: Path | None = None,
    attn_implementation: str = "sdpa",
    llama_cpp: str | None = None,
) -> StageReport:
    """Write the quantised version of a served folder, and measure what it loses.

    `scheme` is `convert.quantize`. Without `data` the fingerprint's probes take the place of its
    rows, training and held-out. `llama_cpp` is the folder of llama.cpp, None for its programs on
    PATH. Notes of the report name the rows, and the layers that lost most. Raises ContractError if
    this model cannot be quantised in this way, DataError for rows that cannot be read,
    StageProcessError if llama.cpp failed.
    """
    tokens = row_tokens(scorer, served, data, TRAINING_ROWS, rows, reference=reference)
    if scheme.startswith(GGUF):
        kind = scheme.removeprefix(GGUF)
        checks, metrics, made = by_llama_cpp(out, served, kind, llama_cpp, log, log_path)
    else:
        limit = parse_size(max_shard_size)
        checks, metrics, made = _compressed(out, served, scheme, limit, scorer)
    source = "probes of the fingerprint" if data is None else f"data: {TRAINING_ROWS}"
    calibration = {"source": source, "rows": len(tokens)}
    notes = {"scheme": scheme, "calibration": calibration, **made}
    report = StageReport("served", tuple(checks), metrics, notes)
    log.info("quantize: %s, %.0f %% of the size", scheme, 100 * metrics["size_ratio"])
    if not all(check.ok for check in report.checks):
        return report
    model = ModelRef(served, dtype=dtype_of(served), attn_implementation=attn_implementation)
    layers = scorer.perform(layer_errors, model, out, tokens)
    worst, error = layers[0]
    lost = f"{worst} lost most: its outputs are off by {error:.1%} on {len(tokens)} rows"
    log.info("quantize: %s", lost)
    measuring = Measuring(
        scorer.measure, reference, profile, attn_implementation, float32=False
    )  # packed weights are decoded in the dtype that they were made for
    drift, measured = measuring.take(replace(model, path=out), out)
    heldout = row_tokens(scorer, served, data, HELDOUT_ROWS, rows, reference=reference)
    losses, loss_check = heldout_loss(scorer, model, replace(model, path=out), heldout, profile)
    hint = f"{lost}; convert.quantize=none, or convert.quantize_profile=<a wider one>"
    verdicts = [each if each.ok else replace(each, hint=hint) for each in (*measured, loss_check)]
    mean = sum(each for _, each in layers) / len(layers)
    numbers = {**losses, "layers/worst": error, "layers/mean": mean}
    return replace(
        report,
        checks=(*report.checks, *verdicts),
        metrics={**report.metrics, **numbers},
        notes={**notes, "layers": layers[:_SHOWN]},
        drift=drift,
    )


_Made = tuple[Sequence[Check], dict[str, float], dict[str, Any]]
"""Checks, metrics and notes of a written folder, before it is measured."""


def _compressed(out: Path, served: Path, scheme: str, limit: int, scorer: ReferenceScorer) -> _Made:
    """Write the model in the format of compressed-tensors, and check every tensor."""
    source = read_checkpoint(served)
    disk = {name: tuple(info.shape) for name, info in source.items()}
    facts = scorer.perform(model_facts, served, dtype_of(served), disk)
    ignore = left_alone(facts)
    plan = quantized_plan(replace(as_is(source), max_shard_bytes=limit), facts, scheme)
    done = scorer.perform(write, plan, {WEIGHTS: source}, out)
    config = scorer.perform(library_config, scheme, ignore)
    _copy_other_files(served, out)
    write_json(out / CONFIG, {**read_json(served / CONFIG), "quantization_config": config})
    made = read_checkpoint(out)
    named = {name: info for name, info in made.items() if name not in facts.tied}
    checks = judge(quantized_contract(facts, scheme), named)
    checks += [check for check in values_read(plan, done) if not check.ok]
    nbytes = size_of(made)
    metrics = {
        "size_ratio": nbytes / size_of(source),
        "bytes": float(nbytes),
        "tensors": float(len(named)),
    }
    return checks, metrics, {"left_alone": ignore}


def by_llama_cpp(
    out: Path, served: Path, kind: str, folder: str | None, log: Log, log_path: Path
) -> _Made:
    """Write one GGUF file by llama.cpp's own converter, and its quantiser for the smaller types.

    `kind` is the type of the file, such as "q8_0". Raises ConfigError if a program was not found,
    StageProcessError if one failed: llama.cpp does not know every model and tokenizer.
    """
    programs = find_programs(folder)
    file = out / f"{WEIGHTS}-{kind}.gguf"
    direct = kind in CONVERTED
    first = file if direct else out / f".{WEIGHTS}-bf16.gguf"
    if programs.converter is None or not (direct or programs.quantizer):
        raise ConfigError(
            f"convert.quantize={GGUF}{kind}: llama.cpp was not found",
            hint="convert.llama_cpp=<folder of llama.cpp, built>",
        )
    converter = programs.converter.resolve()
    command = [sys.executable, str(converter), str(served), "--outfile", str(first)]
    env = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = str(converter.parent)  # it imports modules beside it
    steps = [[*command, "--outtype", kind if direct else "bf16"]]
    steps += [] if direct else [[str(programs.quantizer), str(first), str(file), kind]]
    for argv in steps:
        launch(argv, stage="quantize", log=log, log_path=log_path, env=env)
    if not direct:
        first.unlink()
    _copy_other_files(served, out)
    write_json(out / CONFIG, read_json(served / CONFIG))
    size = file.stat().st_size
    ratio = size / size_of(read_checkpoint(served))
    return (), {"size_ratio": ratio, "bytes": float(size)}, {"file": file.name}


def row_tokens(
    scorer: ReferenceScorer, tokenizer: Path, data: Path | None, name: str, count: int, *,
    reference: Path,
) -> list[list[int]]:  # fmt: skip
    """Return the token ids of dataset rows, spread evenly over the file. Raises DataError."""
    if data is None:
        return [list(probe) for probe in Fingerprint.load(reference / FINGERPRINT).probes]
    path = data / name
    try:
        with path.open("rb") as file:
            total = sum(1 for _ in file)
        with path.open("rb") as file:
            chosen = islice(file, 0, None, max(1, total // count))
            rows = [json.loads(line) for line in islice(chosen, count)]
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise DataError(f"{path} is empty: nothing to measure a quantised model on")
    if "text" in rows[0]:
        tokens = scorer.encode_texts(tokenizer, [row["text"] for row in rows], limit=ROW_TOKENS)
    elif all(_messages(row)[-1]["role"] == "assistant" for row in rows):
        tokens = scorer.encode_whole(tokenizer, [chat(_messages(row), row) for row in rows])
    else:
        tokens = scorer.encode(tokenizer, rows).tokens
    return [ids[:ROW_TOKENS] for ids in tokens if len(ids) > 1]


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    return list(row["messages"]) if "messages" in row else [*row["prompt"], *row["chosen"]]


def heldout_loss(
    scorer: ReferenceScorer,
    model: ModelRef,
    quantized: ModelRef,
    rows: Sequence[Sequence[int]],
    limit: DriftLimit,
) -> tuple[dict[str, float], Check]:
    """Compare the loss of a quantised model with that of the model in 16 bits.

    The loss may rise by the mean KL that the profile allows, since that is what the KL costs on
    text of the model itself, and by two standard errors of the difference. Above one nat per token
    the limit is that share of the loss: text that surprises a model moves more.

    Returns `quantized/loss/before` and `after`, in nats per token, and the verdict.
    """
    starts, rest = [row[:1] for row in rows], [row[1:] for row in rows]
    before, after = (
        [-logprob for row in scorer.token_logprobs(each, starts, rest) for logprob in row]
        for each in (model, quantized)
    )
    count = len(before)
    rises = [new - old for old, new in zip(before, after, strict=True)]
    rise, loss = sum(rises) / count, sum(before) / count
    error = (sum((each - rise) ** 2 for each in rises) / count**2) ** 0.5
    allowed = limit.mean_kl * max(1.0, loss)
    check = Check(
        "held-out loss beside 16 bits",
        f"<= {loss:.4f} + {allowed:.2g} nats per token",
        f"{loss + rise:.4f} (+- {error:.1g}, {count} tokens)",
        ok=rise - 2 * error <= allowed,
    )
    return {"quantized/loss/before": loss, "quantized/loss/after": loss + rise}, check


def _copy_other_files(served: Path, out: Path) -> None:
    """Copy the tokenizer and all other files that are neither weights nor records of a stage."""
    for path in sorted(served.iterdir()):
        weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if not weights and path.name not in (MANIFEST, CONTRACT, FINGERPRINT, CONFIG):
            copy_file(path, out / path.name)
