"""Write the `shards` artifact: partitions, and from rank 0 configs, tokenizer, metrics."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tasks.core.errors import TrainingError
from tasks.core.events import emit
from tasks.drift.fingerprint import Fingerprint, ScorePrint
from tasks.training.engine.checkpoint import Progress
from tasks.training.engine.deepspeed_engine import (
    Ranks,
    full_shape,
    not_finite,
    own_partitions,
    trainable,
    write_partitions,
)
from tasks.training.job import TrainJob
from tasks.training.tokens.data import holds_texts
from tasks.weights.files.documents import read_json, write_json
from tasks.weights.files.dtypes import short_name
from tasks.weights.files.folder import CONFIG, PROCESSORS, copy_side_file, side_files
from tasks.weights.model_class import loadable_attention
from tasks.weights.shards import PARTITIONS, SHARDS
from tasks.witness.plumbline_witness.prints import FINGERPRINT, SCORES


def write_shards(model: Any, out: Path, ranks: Ranks) -> None:
    """Write this rank's partitions of the trained tensors, all finite, to `out / "shards"`."""
    partitions = own_partitions(model, rank=ranks.rank, world_size=ranks.world_size)
    if broken := not_finite(partitions):
        raise TrainingError(
            f"after the last step {len(broken)} trained tensors are not finite, first {broken[0]} "
            f"on rank {ranks.rank}",
            details=broken[:20],
        )
    write_partitions(partitions, out / SHARDS, rank=ranks.rank, world_size=ranks.world_size)


def write_model(job: TrainJob, *, model: Any, tokenizer: Any) -> None:
    """Write every file that does not depend on training: partition index, configs, tokenizer.

    Call it before the first step: a base that cannot be written then costs no training.
    """
    settings, parameters, out = job.settings, trainable(model), job.out
    full = settings.peft.kind == "none"
    document = {
        "format": 1,
        "world_size": settings.world_size,
        "zero_stage": settings.zero.stage,
        "mode": "full" if full else "adapter",
        "dtype": ",".join(sorted({short_name(p.dtype) for p in parameters.values()})),
        "parameters": {name: {"shape": list(full_shape(p))} for name, p in parameters.items()},
    }
    write_json(out / PARTITIONS, document)
    if not full:
        write_adapter_config(model, out)
        model = model.get_base_model()
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):  # training's own, not the model's
        del config.quantization_config
    config.architectures = [type(model).__name__]  # a reward model differs from its base
    config.to_json_file(out / "config.json", use_diff=True)
    generation = job.side_files / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, out / generation.name)
    else:
        from transformers import GenerationConfig

        # A reward model has none. `save_pretrained` would refuse the sampling settings of the base.
        GenerationConfig.from_model_config(config).to_json_file(out / generation.name)
    tokenizer.save_pretrained(out / "tokenizer")
    for path in side_files(job.side_files, PROCESSORS):
        copy_side_file(path, out / "tokenizer" / path.name)


def write_adapter_config(model: Any, out: Path) -> None:
    """Write adapter_config.json of peft's model, byte-identical on every machine."""
    config = copy.deepcopy(model.peft_config["default"])
    # peft writes sets in random order, and the base as a path of this machine.
    for name in ("target_modules", "exclude_modules", "modules_to_save"):
        value = getattr(config, name)
        if isinstance(value, (set, list, tuple)):
            setattr(config, name, sorted(set(value)))
    config.base_model_name_or_path = None
    config.inference_mode = True
    config.save_pretrained(out)


def finish(
    engine: Any,
    job: TrainJob,
    ranks: Ranks,
    progress: Progress,
    metrics: dict[str, float],
    measured: Fingerprint | ScorePrint,
    *,
    scores: Mapping[str, float] | None = None,
    reserved: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Write the results of a run, emit the event "done", and free the engine.

    `metrics` are beside those that every run has; `reserved` is for `Ranks.peak_memory`.
    """
    peak = float(ranks.peak_memory(**reserved))
    if ranks.first:
        metrics = {
            "steps": float(progress.step), "loss": progress.losses[-1], **metrics,
            "train_s": progress.seconds, "peak_memory": peak,
        }  # fmt: skip
        if progress.best is not None:
            metrics["best_step"] = float(progress.best.step)
        write_results(job, metrics=metrics, progress=progress, measured=measured, scores=scores)
        emit("done", **metrics)
    engine.destroy()


def write_results(
    job: TrainJob,
    *,
    metrics: dict[str, float],
    progress: Progress,
    measured: Fingerprint | ScorePrint,
    scores: Mapping[str, float] | None = None,
) -> None:
    """Write `train.json`, and the fingerprint of the live engine or a reward model's scores."""
    settings, out = job.settings, job.out
    mark = FINGERPRINT if isinstance(measured, Fingerprint) else SCORES
    document = {
        "objective": settings.objective,
        "metrics": metrics,
        "losses": progress.losses,
        "evaluations": progress.evaluations,
        "quantization": settings.peft.quantization(settings.dtype),
        "attn_implementation": loadable_attention(
            read_json(job.base / CONFIG), settings.attn_implementation
        ),
        "base_digest": job.base_digest,
        "texts": holds_texts(job.data / "heldout.jsonl"),  # raw texts need no chat template
        "print": mark,  # file name of the fingerprint
        "scores": scores,
    }
    write_json(out / "train.json", document)
    measured.save(out / mark)
