"""Limit the layers and experts of a config.json before a model is built from it.

With `num_hidden_layers: 1000000000` transformers makes a list of so many names before the first
layer, and the model on the meta device would fill all memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_LAYERS = 2_000
"""Published models have up to about 1,000."""
MAX_EXPERTS = 20_000
"""Published models have up to 16,384, where experts are rows of a table; others about 500."""
MAX_PARTS = 600_000
"""Layers times experts."""
_LAYERS = re.compile(r"(.*_)?(layers?|depth|blocks)")
_EXPERTS = re.compile(r"(.*_)?experts")
_DEEPEST = 4


def oversized(config: Mapping[str, Any]) -> str:
    """Return the setting of a config.json that exceeds a limit, as a text; "" if none does."""
    layers, experts = 1, 1
    for name, value in _numbers(config, _DEEPEST):
        if _LAYERS.fullmatch(name):
            layers = max(layers, value)
            if value > MAX_LAYERS:
                return f"{name} {_shown(value)}, models have up to {MAX_LAYERS}"
        elif _EXPERTS.fullmatch(name):
            experts = max(experts, value)
            if value > MAX_EXPERTS:
                return f"{name} {_shown(value)}, models have up to {MAX_EXPERTS}"
    if layers * experts > MAX_PARTS:
        return f"{layers} layers of {experts} experts, models have up to {MAX_PARTS} together"
    return ""


def _numbers(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, int]]:
    """Yield the integers of a configuration and of those nested in it, by name."""
    for name, value in config.items():
        if type(value) is int and isinstance(name, str):  # configuration objects have other keys
            yield name, value
        elif isinstance(value, Mapping) and depth:
            yield from _numbers(value, depth - 1)


def _shown(value: int) -> str:
    return str(value) if value < 10**18 else "of more than 18 digits"
