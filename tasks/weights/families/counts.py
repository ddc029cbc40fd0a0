"""How many layers and experts a config.json may ask for before anybody makes so many.

Libraries believe it: `num_hidden_layers: 1000000000` has transformers make a list of so many names
before it makes the first layer, and the same on the meta device takes all memory there is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

MAX_LAYERS = 2_000
"""The deepest model published has some 1,000."""
MAX_EXPERTS = 20_000
"""Of a family whose experts are rows of a table there are 16,384; of others some 500."""
MAX_PARTS = 600_000
"""Layers times experts."""
_LAYERS = re.compile(r"(.*_)?(layers?|depth|blocks)")
_EXPERTS = re.compile(r"(.*_)?experts")
_DEEPEST = 4


def oversized(config: Mapping[str, Any]) -> str:
    """What of a config.json asks for more parts than any model has; "" where nothing does."""
    layers, experts = 1, 1
    for name, value in _numbers(config, _DEEPEST):
        if _LAYERS.fullmatch(name):
            layers = max(layers, value)
            if value > MAX_LAYERS:
                return f"{name} {_said(value)}, models have up to {MAX_LAYERS}"
        elif _EXPERTS.fullmatch(name):
            experts = max(experts, value)
            if value > MAX_EXPERTS:
                return f"{name} {_said(value)}, models have up to {MAX_EXPERTS}"
    if layers * experts > MAX_PARTS:
        return f"{layers} layers of {experts} experts, models have up to {MAX_PARTS} together"
    return ""


def _numbers(config: Mapping[str, Any], depth: int) -> Iterator[tuple[str, int]]:
    """Whole numbers by name, those of configurations within it too."""
    for name, value in config.items():
        if type(value) is int and isinstance(name, str):  # as objects they may have other keys
            yield name, value
        elif isinstance(value, Mapping) and depth:
            yield from _numbers(value, depth - 1)


def _said(value: int) -> str:
    return str(value) if value < 10**18 else "of more than 18 digits"
