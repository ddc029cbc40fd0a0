"""quantize: `served` -> a second `served` folder, with fewer bits, or for llama.cpp.

The folder in 16 bits stays as it is; the quantised one is a hand-off of its own, with its own
contract, manifest and drift limit. Its layers are also compared one by one on training rows, so
that a refusal names the layer that lost most. `smoke_eval` then serves both folders.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
from tasks.pipeline.artifact import MANIFEST, inventory
from tasks.pipeline.report import StageReport
from tasks.pipeline.stage import CONTRACT
from tasks.process.launch import launch
from tasks.serving.llama_cpp import find_programs
from tasks.weights.execute.outcome import values_read
from tasks.weights.execute.worker import write
from tasks.weights.execute.writer import parse_size
from tasks.weights.files.documents import read_json
from tasks.weights.files.reader import WEIGHTS, Checkpoint, read_checkpoint
from tasks.weights.model import Model, model_facts
from tasks.weights.plan import as_is
from tasks.weights.quantized import gptq
from tasks.weights.quantized.quantize import (
    GGUF,
    SCHEMES,
    left_alone,
    library_config,
    quantized_contract,
    quantized_plan,
)
from tasks.witness.plumbline_witness.prints import FINGERPRINT

Log = logging.Logger | logging.LoggerAdapter[Any]
ENVIRONMENT = Path(f"{sys.prefix}-quantize", "bin", "python")
"""Interpreter of the environment of `make setup-quantize`."""
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
    group: int,
    profile: DriftLimit,
    scorer: ReferenceScorer,
    log: Log,
    log_path: Path,
    data: Path | None = None,
    attn_implementation: str = "sdpa",
    llama_cpp: str | None = None,
) -> StageReport:
    """Write the quantised version of a served folder, and measure what it loses.

    `scheme` is `convert.quantize`, `group` the numbers of a row that share a scale in 4 bits.
    Without `data` the fingerprint's probes take the place of its rows, training and held-out.
    `llama_cpp` is the folder of llama.cpp, None for its programs on PATH. Notes of the report name
    the rows, and the layers that lost most. Raises ContractError if this model cannot be quantised
    in this way, DataError for rows that cannot be read, StageProcessError if llm-compressor or
    llama.cpp failed.
    """
    tokens = row_tokens(scorer, served, data, TRAINING_ROWS, rows, reference=reference)
    if scheme.startswith(GGUF):
        made = by_llama_cpp(out, served, scheme.removeprefix(GGUF), llama_cpp, log, log_path)
    else:
        limit = parse_size(max_shard_size)
        made = _compressed(out, served, scheme, tokens, limit, group, scorer, log, log_path)
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


def _compressed(
    out: Path, served: Path, scheme: str, tokens: Sequence[Sequence[int]], limit: int, group: int,
    scorer: ReferenceScorer, log: Log, log_path: Path,
) -> _Made:  # fmt: skip
    """Write the model in the format of compressed-tensors, and check every tensor."""
    source = read_checkpoint(served)
    disk = {name: tuple(info.shape) for name, info in source.tensors.items()}
    facts = scorer.perform(model_facts, served, dtype_of(served), disk)
    ignore = left_alone(facts)
    if scheme in SCHEMES:
        plan = replace(as_is(source), max_shard_bytes=limit)
        plan = quantized_plan(plan, facts, scheme)
        done = scorer.perform(write, plan, {WEIGHTS: source}, out)
        config = scorer.perform(library_config, scheme, ignore)
        values = values_read(plan, done)
    else:
        job = {"model": str(served), "dtype": dtype_of(served), "rows": tokens, "ignore": ignore}
        config = _by_gptq(out, {**job, "shard": limit, "group": group}, log, log_path)
        values = list(_untouched(out, source, facts))
    _copy_other_files(served, out)
    write_json(out / CONFIG, {**read_json(served / CONFIG), "quantization_config": config})
    made = read_checkpoint(out)
    named = {name: info for name, info in made.tensors.items() if name not in facts.tied}
    checks = [*judge(quantized_contract(facts, scheme, group=group), named)]
    checks += [check for check in values if not check.ok]
    metrics = {
        "size_ratio": made.nbytes / source.nbytes,
        "bytes": float(made.nbytes),
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
    ratio = size / read_checkpoint(served).nbytes
    return _Made((), {"size_ratio": ratio, "bytes": float(size)}, {"file": file.name})


def _by_gptq(out: Path, job: dict[str, Any], log: Log, log_path: Path) -> dict[str, Any]:
    """Run llm-compressor in its own environment; move the weights it wrote into `out`.

    Returns `quantization_config` for config.json.
    """
    with tempfile.TemporaryDirectory(dir=out, prefix=".gptq-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps({**job, "out": str(folder / "out")}))
        launch(
            [str(ENVIRONMENT), gptq.__file__, str(folder / "job.json")],
            stage="quantize",
            log=log,
            log_path=log_path,
            env={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
        )
        for path in (folder / "out").glob("*.safetensors*"):
            path.rename(out / path.name).chmod(0o644)  # safetensors writes files of its owner alone
        config: dict[str, Any] = read_json(folder / "out" / CONFIG)["quantization_config"]
    return config


def _untouched(out: Path, source: Checkpoint, facts: Model) -> Iterator[Check]:
    """Yield a verdict on each tensor that is not quantised: its bytes are those of the source."""
    made, known = _hashes(out), {key: t.hash for key, t in source.tensors.items()}
    if None in known.values():
        known = {**_hashes(source.root)}
    for name in sorted(set(made) & set(known) - set(facts.quantized)):
        same = made[name] == known[name]
        yield Check(name, "the bytes in 16 bits", "the same" if same else "others", ok=same)


def _hashes(folder: Path) -> dict[str, str]:
    files, _ = inventory(folder)
    return {name: entry["blake3"] for file in files.values() for name, entry in file.items()}


def _copy_other_files(served: Path, out: Path) -> None:
    """Copy the tokenizer and all other files that are neither weights nor records of a stage."""
    for path in sorted(served.iterdir()):
        weights = path.name.endswith((".safetensors", ".safetensors.index.json"))
        if not weights and path.name not in (MANIFEST, CONTRACT, FINGERPRINT, CONFIG):
            copy_file(path, out / path.name)
