"""Write the record of a live model into a checkpoint: `witness(model, tokenizer, out)`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .measure import measure_logprobs, measure_scores, other_rounding, undisturbed
from .prints import BASE, FINGERPRINT, FOLDER, FORMAT, NOISE, SCORES, Fingerprint, ScorePrint
from .probes import Probe, choose, ids_of_row, text_with_tools

AGAIN = 8
"""Probes that are measured again: the difference is the noise of the engine, or of 16 bits."""


def witness(
    model: Any,
    tokenizer: Any,
    out: str | os.PathLike[str],
    *,
    prompts: Sequence[str] = (),
    rows: Iterable[Any] = (),
    facts: Mapping[str, Any] | None = None,
) -> Path:
    """Measure a live model and write `<out>/plumbline.witness`. Every rank has to call it.

    The model is called with `input_ids` and `attention_mask`, in evaluation mode, without
    gradients. Modes and random state are restored.

    Args:
        model: as it is trained: with its adapter, wrapped or not.
        tokenizer: of transformers, with the chat template of the training.
        out: the checkpoint's folder.
        prompts: texts of the user's own, to measure besides the public ones.
        rows: training examples with token ids (`input_ids`).
        facts: further facts to record, e.g. the step.
    """
    rows = list(rows)
    probes = _same_on_all_ranks(choose(tokenizer, prompts=prompts, rows=rows))
    sequences = tuple(probe.ids for probe in probes)
    prints: Mapping[str, Fingerprint | ScorePrint]
    with undisturbed(model):
        if is_reward_model(model):
            prints = {SCORES: _scores(model, sequences)}
        else:
            prints = _fingerprints(model, sequences)
    folder = Path(out) / FOLDER
    if not _distributed() or torch.distributed.get_rank() == 0:
        description = {
            "format": FORMAT,
            **describe(model, tokenizer),
            **(facts or {}),
            "longest_row": max((len(ids_of_row(row)) for row in rows), default=0),
            "probes": [asdict(probe) for probe in probes],
            "text_with_tools": text_with_tools(tokenizer),
        }
        _write(folder, description, prints)
    return folder


def _scores(model: Any, sequences: tuple[tuple[int, ...], ...]) -> ScorePrint:
    """Return the scores, and their mean absolute difference when measured one by one."""
    together = measure_scores(model, sequences)
    alone = measure_scores(model, sequences[:AGAIN], batch=1)
    noise = float(np.abs(np.subtract(together[:AGAIN], alone)).mean())
    return ScorePrint(sequences, tuple(together), "trainer", noise)


def _fingerprints(model: Any, sequences: tuple[tuple[int, ...], ...]) -> dict[str, Fingerprint]:
    """Return the fingerprints by file: trained model, its base, the noise of 16 bits."""
    trained = measure_logprobs(model, sequences)
    prints = {FINGERPRINT: trained}
    inner = unwrap(model)
    if hasattr(inner, "peft_config") and hasattr(inner, "disable_adapter"):
        with inner.disable_adapter():
            prints[BASE] = measure_logprobs(model, sequences, at=trained.ids)
    embeddings = inner.get_input_embeddings() if hasattr(inner, "get_input_embeddings") else None
    if embeddings is not None:
        few = sequences[:AGAIN]
        at = trained.ids[: sum(len(ids) - 1 for ids in few)]
        with other_rounding(model, embeddings) as dtype:
            prints[NOISE] = replace(measure_logprobs(model, few, at=at), dtype=dtype)
    return prints


def _write(
    folder: Path, description: Mapping[str, Any], prints: Mapping[str, Fingerprint | ScorePrint]
) -> None:
    """Write all files into a new folder, then rename it: a record is never half written."""
    staging = folder.with_name(f"{folder.name}.{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    (staging / "witness.json").write_text(json.dumps(description, indent=1) + "\n")
    for name, measured in prints.items():
        measured.save(staging / name)
        # safetensors 0.8 writes files that nobody else can read.
        shutil.copymode(staging / "witness.json", staging / name)
    shutil.rmtree(folder, ignore_errors=True)
    staging.rename(folder)


def _distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _same_on_all_ranks(probes: list[Probe]) -> list[Probe]:
    """Return rank 0's probes: with other probes on another rank, a sharded model would hang."""
    shared: list[Any] = [probes]
    if _distributed():
        with contextlib.suppress(RuntimeError):
            torch.distributed.broadcast_object_list(shared, src=0)
    return list(shared[0])


PACKAGES = (
    *("torch", "transformers", "peft", "trl"),
    *("llamafactory", "ms-swift", "axolotl", "unsloth", "openrlhf", "verl"),
)
_SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id")


def describe(model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return the facts about a model, wrapped or not, and its tokenizer of transformers."""
    inner = unwrap(model)
    config: Any = getattr(inner, "config", None)
    generation = getattr(inner, "generation_config", None)
    return {
        "base": _base(config),
        "quantization": quantization(inner),
        "peft": _peft(inner),
        "tokens": {
            "tokenizer": _tokenizer(tokenizer),
            "config": {key: getattr(config, key, None) for key in _SPECIAL},
            "generation_config": plain(generation.to_diff_dict()) if generation else None,
        },
        "versions": _versions(),
    }


def unwrap(model: Any) -> Any:
    """Return the model inside of DDP, FSDP, DeepSpeed or torch.compile."""
    for name in ("_fsdp_wrapped_module", "_orig_mod", "module"):
        inner = getattr(model, name, None)
        if isinstance(inner, torch.nn.Module):
            return unwrap(inner)
    return model


def is_reward_model(model: Any) -> bool:
    """Return True for a classifier with one output."""
    kinds = (type(module).__name__ for module in model.modules())
    config = getattr(unwrap(model), "config", None)
    classifies = any(kind.endswith("ForSequenceClassification") for kind in kinds)
    return classifies and getattr(config, "num_labels", 0) == 1


def plain(value: Any) -> Any:
    """Return a value as JSON can hold it: sets are sorted, other objects become text."""
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted(plain(part) for part in value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(getattr(value, "value", value))


def quantization(model: torch.nn.Module) -> dict[str, Any]:
    """Return how the weights of linear layers are stored, from the layers themselves.

    `method` is "none", "nf4", "fp4", "int8", or what the configuration says. It settles the base
    that an adapter has to be merged into.
    """
    for module in model.modules():
        kind = type(module).__name__
        weight: Any = getattr(module, "weight", None)
        if kind.endswith("Linear4bit") and hasattr(weight, "quant_type"):
            compute = getattr(module, "compute_dtype", None)
            return {
                "method": str(weight.quant_type),
                "double_quant": bool(weight.compress_statistics),
                "compute_dtype": None if compute is None else str(compute).replace("torch.", ""),
            }
        if kind.endswith("Linear8bitLt"):
            return {"method": "int8"}
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None:
        config = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        return {"method": str(plain(config.get("quant_method")))}
    return {"method": "none"}


def headers_digest(folder: Path) -> str | None:
    """Return the SHA-256 of names, dtypes and shapes of all safetensors files; None without any."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        header.pop("__metadata__", None)
        tensors.update({name: [entry["dtype"], entry["shape"]] for name, entry in header.items()})
    return _sha256(json.dumps(tensors, sort_keys=True)) if tensors else None


def _base(config: Any) -> dict[str, Any]:
    """Return name and digest of the base: a folder, or its snapshot in the hub's cache."""
    name, digest = str(getattr(config, "_name_or_path", "") or ""), None
    with contextlib.suppress(Exception):
        from huggingface_hub import try_to_load_from_cache

        cached = None if Path(name).is_dir() else try_to_load_from_cache(name, "config.json")
        folder = Path(cached).parent if isinstance(cached, str) else Path(name)
        digest = headers_digest(folder) if name else None
    return {"name": name, "headers_sha256": digest}


def _peft(model: Any) -> dict[str, Any] | None:
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping):
        return None
    active = getattr(model, "active_adapters", None) or getattr(model, "active_adapter", None)
    active = active() if callable(active) else active
    return {
        "active": [active] if isinstance(active, str) else plain(active),
        "adapters": {name: plain(config.to_dict()) for name, config in configs.items()},
    }


def _tokenizer(tokenizer: Any) -> dict[str, Any]:
    template = getattr(tokenizer, "chat_template", None)
    template = json.dumps(template, sort_keys=True) if isinstance(template, dict) else template
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    return {
        "length": len(tokenizer),
        **{key: getattr(tokenizer, key, None) for key in _SPECIAL},
        "chat_template_sha256": _sha256(template),
        "backend_sha256": _sha256(backend.to_str() if hasattr(backend, "to_str") else None),
    }


def _sha256(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions
