"""Fields of configuration files, and the classes that vLLM and transformers have.

The files are untrusted: a field of a wrong type counts as absent. `tests/audit/test_known.py`
makes `known_classes.json` from the installed libraries: importing either takes longer than an
audit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Known:
    """Classes of vLLM (`served`) and of transformers (`kinds`, by `model_type`).

    Attributes:
        last_version: for each class that vLLM removed, the last version that had it.
        suffixes: endings of class names that vLLM treats as interchangeable.
    """

    vllm: str
    served: frozenset[str]
    last_version: Mapping[str, str]
    suffixes: tuple[str, ...]
    kinds: Mapping[str, frozenset[str]]

    @property
    def classes(self) -> frozenset[str]:
        """All classes of transformers that generate or classify."""
        return frozenset().union(*self.kinds.values())

    def serves(self, name: str) -> bool:
        """Return True if vLLM has the class or derives it, e.g. a classifier from a generator.

        See `_normalize_arch` of vLLM's registry.
        """
        if name in self.served:
            return True
        ending = next((suffix for suffix in self.suffixes if name.endswith(suffix)), None)
        if ending is None:
            return False
        stem = name.removesuffix(ending)
        return any(f"{stem}{suffix}" in self.served for suffix in self.suffixes if stem)

    def kinds_of(self, name: str) -> frozenset[str]:
        """Return every `model_type` of a class."""
        return frozenset(kind for kind, names in self.kinds.items() if name in names)


@cache
def known() -> Known:
    """Load `known_classes.json`."""
    raw = json.loads(Path(__file__).with_name("known_classes.json").read_text())
    vllm, transformers = raw["vllm"], raw["transformers"]
    return Known(
        vllm=vllm["version"],
        served=frozenset(vllm["classes"]),
        last_version=vllm["last_version"],
        suffixes=tuple(vllm["suffixes"]),
        kinds={kind: frozenset(names) for kind, names in transformers["classes"].items()},
    )


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
