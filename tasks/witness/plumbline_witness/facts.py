"""Describe a live model: what its numbers depend on, as plain JSON values."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

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
