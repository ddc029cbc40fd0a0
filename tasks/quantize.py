"""quantize: `served` -> a second `served` folder, with fewer bits, or for llama.cpp.

The folder in 16 bits stays as it is; the quantised one is a hand-off of its own, with its own
contract, manifest and drift limit. Its layers are also compared one by one on training rows, so
that a refusal names the layer that lost most. `smoke_eval` then serves both folders.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.core.contract import Check, judge
from tasks.core.errors import ConfigError
from tasks.core.files import copy_file
from tasks.drift.fingerprint import DriftLimit
from tasks.evaluation.calibration import (
    HELDOUT_ROWS,
    TRAINING_ROWS,
    heldout_loss,
    row_tokens,
)
from tasks.evaluation.measuring import Measuring
from tasks.evaluation.model_folder import CONFIG, dtype_of, write_json
from tasks.evaluation.scoring import ModelRef, ReferenceScorer
from tasks.pipeline.artifact import MANIFEST
from tasks.pipeline.report import StageReport
from tasks.pipeline.stage import CONTRACT
from tasks.process.launch import launch
from tasks.serving.llama_cpp import find_programs
from tasks.weights.files.documents import read_json
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
from tasks.weights.written import values_read
from tasks.witness.plumbline_witness.prints import FINGERPRINT

Log = logging.Logger | logging.LoggerAdapter[Any]
CONVERTED = ("f16", "bf16", "q8_0")
"""Types of GGUF that llama.cpp's converter writes; its quantiser makes all others from bf16."""
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
        made = by_llama_cpp(out, served, scheme.removeprefix(GGUF), llama_cpp, log, log_path)
    else:
        limit = parse_size(max_shard_size)
        made = _compressed(out, served, scheme, limit, scorer)
    source = "probes of the fingerprint" if data is None else f"data: {TRAINING_ROWS}"
    calibration = {"source": source, "rows": len(tokens)}
    notes = {"scheme": scheme, "calibration": calibration, **made.notes}
    report = StageReport("served", tuple(made.checks), made.metrics, notes)
    log.info("quantize: %s, %.0f %% of the size", scheme, 100 * made.metrics["size_ratio"])
    if not all(check.ok for check in report.checks):
        return report
    model = ModelRef(served, dtype=dtype_of(served), attn_implementation=attn_implementation)
    layers = scorer.layer_errors(model, out, tokens)
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


@dataclass(frozen=True)
class _Made:
    """Checks and numbers of a written folder, before it is measured."""

    checks: Sequence[Check]
    metrics: dict[str, float]
    notes: dict[str, Any]


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
    return _Made(checks, metrics, {"left_alone": ignore})


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
    return _Made((), {"size_ratio": ratio, "bytes": float(size)}, {"file": file.name})


def _copy_other_files(served: Path, out: Path) -> None:
    """Copy the tokenizer and all other files that are neither weights nor records of a stage."""
    for path in sorted(served.iterdir()):
        weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if not weights and path.name not in (MANIFEST, CONTRACT, FINGERPRINT, CONFIG):
            copy_file(path, out / path.name)
