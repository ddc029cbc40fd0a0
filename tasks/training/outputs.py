"""What rank 0 leaves beside the shares: everything that is needed to make a model of them."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from tasks.fingerprint import Fingerprint
from tasks.training.job import TrainJob
from tasks.training.partitions import describe

FINGERPRINT = "fingerprint.fp"


def write_common(
    job: TrainJob,
    *,
    model: Any,
    tokenizer: Any,
    metrics: dict[str, float],
    records: list[dict[str, float]],
    fingerprint: Fingerprint,
) -> None:
    """Write every file of the `shards` artifact that is no rank's own."""
    settings, out = job.settings, job.out
    adapted = settings.peft.kind != "none"
    mode = "adapter" if adapted else "full"
    _write_json(
        out / "partitions.json",
        describe(
            model,
            world_size=settings.world_size,
            zero_stage=settings.zero.stage,
            mode=mode,
        ),
    )
    if adapted:
        _write_adapter_config(model, out)
    _write_model_config(job, model.get_base_model() if adapted else model)
    tokenizer.save_pretrained(out / "tokenizer")
    _write_json(
        out / "train.json",
        {
            "objective": settings.objective,
            "metrics": metrics,
            "losses": [r["loss"] for r in records],
            "quantization": settings.peft.quantization(),
            "attn_implementation": settings.attn_implementation,
            "base_digest": job.base_digest,
        },
    )
    fingerprint.save(out / FINGERPRINT)


def _write_adapter_config(model: Any, out: Path) -> None:
    config = copy.deepcopy(model.peft_config["default"])
    # A set would be written in an order that changes from run to run, a path would tie the
    # artifact to this machine.
    config.target_modules = sorted(config.target_modules)
    config.base_model_name_or_path = None
    config.inference_mode = True
    config.save_pretrained(out)


def _write_model_config(job: TrainJob, model: Any) -> None:
    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):  # how the base was held, not what it is
        del config.quantization_config
    config.to_json_file(job.out / "config.json", use_diff=True)
    source = job.base / "generation_config.json"
    if source.is_file():
        shutil.copyfile(source, job.out / source.name)
    else:
        model.generation_config.save_pretrained(job.out)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
