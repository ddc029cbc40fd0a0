"""What configuration documents say, where it is of the type it should be.

Anybody may have written them: what has another type is as good as not said.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_TEXT = ("text_config", "llm_config", "language_config")
_NO_PARTS = {"quantization_config", "compression_config"}
_TOWERS = ("vision_config", "audio_config", "vit_config", "visual")


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model: of multimodal ones they lie in a mapping of their own."""
    for name in _TEXT:
        if isinstance(config.get(name), Mapping):
            return config[name]
    return config


def of_text(config: Mapping[str, Any], name: str) -> Any:
    """A setting of the language model, wherever the family says it."""
    inner = text_config(config).get(name)
    return config.get(name) if inner is None else inner


def is_multimodal(config: Mapping[str, Any]) -> bool:
    """Whether it has a tower for images or sounds."""
    return any(isinstance(config.get(name), Mapping) for name in _TOWERS)


def is_plain_text(config: Mapping[str, Any]) -> bool:
    """Whether it is a language model's own configuration, without parts of any kind."""
    parts = {name for name in config if name.endswith("_config")} - _NO_PARTS
    return not is_multimodal(config) and not any(isinstance(config[one], Mapping) for one in parts)


def whole(value: Any) -> int | None:
    """A whole number that is one; `true` is none."""
    return value if type(value) is int else None


def texts(value: Any) -> tuple[str, ...]:
    """A list of texts; a text alone is one of one."""
    if isinstance(value, str):
        return (value,)
    return tuple(one for one in value if isinstance(one, str)) if isinstance(value, list) else ()


def token_ids(value: Any) -> tuple[int, ...]:
    """`eos_token_id` and its like: one id, or a list of them."""
    values: Iterable[Any] = value if isinstance(value, list) else [value]
    return tuple(one for one in values if type(one) is int)


def first_architecture(config: Mapping[str, Any]) -> str:
    """The class that config.json names first; "" for none."""
    return next(iter(texts(config.get("architectures"))), "")


def content(value: Any) -> str:
    """A token: its text, or a mapping with the text and how it is cut; "" for neither."""
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else ""
