"""Fields of configuration files, and the classes that transformers has.

The files are untrusted: a field of a wrong type counts as absent. `tests/audit/test_known.py`
makes `known_classes.json` from the installed library, whose import takes longer than an audit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def known_classes() -> Mapping[str, frozenset[str]]:
    """Return the classes of transformers that generate or classify, by `model_type`."""
    raw = json.loads(Path(__file__).with_name("known_classes.json").read_text())
    return {kind: frozenset(names) for kind, names in raw["classes"].items()}


_TEXT = ("text_config", "llm_config", "language_config")
_NO_PARTS = {"quantization_config", "compression_config"}
_TOWERS = ("vision_config", "audio_config", "vit_config", "visual")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the language model.

    Multimodal models keep them in a mapping of their own, e.g. `text_config`.
    """
    for name in _TEXT:
        if isinstance(config.get(name), Mapping):
            return config[name]
    return config


def of_text(config: Mapping[str, Any], name: str) -> Any:
    """Return one setting of the language model, from its own mapping or from the top level."""
    inner = text_config(config).get(name)
    return config.get(name) if inner is None else inner


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Return True if the model has a vision or audio tower."""
    return any(isinstance(config.get(name), Mapping) for name in _TOWERS)


def is_plain_text(config: Mapping[str, Any]) -> bool:
    """Return True for a language model's own configuration without sub-configurations."""
    parts = {name for name in config if name.endswith("_config")} - _NO_PARTS
    return not is_multimodal(config) and not any(
        isinstance(config[name], Mapping) for name in parts
    )


def whole(value: Any) -> int | None:
    """Return the value if it is an integer (`true` is not), else None."""
    return value if type(value) is int else None


def texts(value: Any) -> tuple[str, ...]:
    """Return a list of strings as a tuple; a single string gives a tuple of one."""
    if isinstance(value, str):
        return (value,)
    return tuple(text for text in value if isinstance(text, str)) if isinstance(value, list) else ()


def token_ids(value: Any) -> tuple[int, ...]:
    """Return `eos_token_id` or a similar field as a tuple: it holds one id or a list of ids."""
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    return tuple(number for number in values if type(number) is int)


def first_architecture(config: Mapping[str, Any]) -> str:
    """Return the first class that config.json names, or ""."""
    return next(iter(texts(config.get("architectures"))), "")


def content(value: Any) -> str:
    """Return the text of a token, which is a string or a mapping with `content`, or ""."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""
