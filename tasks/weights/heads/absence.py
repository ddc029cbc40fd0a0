"""Explain why a folder that should have a head has none.

A head that was never saved cannot be replaced: a new one would give random scores without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.weights.files.names import PEFT_PREFIX
from tasks.weights.heads.folder import HeadFolder, architectures

HEAD_MODULES = ("score", "value_head", "v_head", "classifier")
"""Module names of heads; OpenRLHF's config.json may name another one."""
OPENRLHF = ("RewardModel", "CriticModel")
"""Class names that OpenRLHF makes at run time; transformers does not know them."""
_LAYERED = re.compile(
    r"(classifier|score)\.(?!weight$|bias$|lora_|base_layer)|(classification_head|sequence_summary|logits_proj)\."
    r"|perceiver\.decoder\."
)
"""Keys of heads with several layers, as in BERT-like encoders, T5, BART and XLNet."""
_LOST = "it was never saved, so it cannot be recovered: train again with the head saved whole"


def module_names(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the module names that may be a head, first the one that config.json names."""
    prefix = config.get("value_head_prefix")
    return tuple(dict.fromkeys((*((prefix,) if isinstance(prefix, str) else ()), *HEAD_MODULES)))


def lora_modules(folder: HeadFolder) -> Iterator[str]:
    """Yield the heads that the adapter changes by LoRA."""
    if folder.adapter_config is None:
        return
    keys = folder.sources[folder.weights].tensors
    for module in module_names(folder.config):
        if any(key.startswith(f"{PEFT_PREFIX}{module}.lora_") for key in keys):
            yield module


def absence(folder: HeadFolder, lora_on: str) -> Iterator[str]:
    """Yield the reasons why a folder that should have a head has none; none for a language model.

    Args:
        folder: a folder without a usable head.
        lora_on: module of a head that the adapter changes by LoRA; "" for none.
    """
    if lora_on:
        yield (
            f"{lora_on}: LoRA was trained on a head that is not in the adapter. If it was "
            f"initialised at random, {_LOST} (modules_to_save=[{lora_on}])"
        )
        return
    if layered := layered_head(folder):
        yield f"{layered}: a head of several layers; only heads of one linear layer are supported"
        return
    reasons = [*_says_head(folder.config), *_adapter_says_head(folder.adapter_config or {})]
    if reasons:
        names = ", ".join(f"{module}.weight" for module in HEAD_MODULES)
        yield f"no head ({names}), though {reasons[0]}: {_LOST}"


def layered_head(folder: HeadFolder) -> str:
    """Return the first key of a head of several layers; "" if there is none."""
    keys = folder.sources[folder.weights].tensors
    heads = (key for key in keys if _LAYERED.match(key.removeprefix(PEFT_PREFIX)))
    says = (*_says_head(folder.config), *_adapter_says_head(folder.adapter_config or {}))
    return next(heads, "") if says else ""


def wrapped_class(adapter_config: Mapping[str, Any]) -> str:
    """Return the class that peft wrapped; "" if not recorded (peft does so without a task type)."""
    auto_mapping = adapter_config.get("auto_mapping")
    name = auto_mapping.get("base_model_class") if isinstance(auto_mapping, Mapping) else None
    return name if isinstance(name, str) else ""


def _has_head(class_name: str) -> bool:
    """Return True for classes that score: transformers' classifiers, OpenRLHF's two classes."""
    return class_name in OPENRLHF or class_name.endswith("ForSequenceClassification")


def _says_head(config: Mapping[str, Any]) -> Iterator[str]:
    for name in architectures(config):
        if _has_head(name):
            yield f"config.json says {name}"
    for key in ("value_head_prefix", "mean", "normalize_reward"):
        if config.get(key):
            yield f"config.json has {key}"


def _adapter_says_head(config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("task_type") == "SEQ_CLS":
        yield "adapter_config.json says SEQ_CLS"
    if _has_head(wrapped_class(config)):
        yield f"adapter_config.json says that it was trained on a {wrapped_class(config)}"
    for key in ("modules_to_save", "target_modules"):
        named = config.get(key)
        if isinstance(named, list):
            yield from (f"{key} names {module}" for module in HEAD_MODULES if module in named)
