"""Which modules and parameters of a model an adapter is for: peft's own rules.

Not peft's code: importing it takes seconds, and a plan needs it for nothing else. The tests compare
with what peft itself wraps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tasks.weights.adapters.config import AdapterConfig
from tasks.weights.adapters.config_reader import ALL_LINEAR, LAYER, SAVED
from tasks.weights.adapters.live import CONV1D, LINEAR, LiveModel

_HEADS = ("score", "classifier")


def targeted_modules(config: AdapterConfig, live: LiveModel) -> list[str]:
    """Modules that carry a LoRA pair, in the model's order."""
    if config.target_modules == ALL_LINEAR:
        names: set[str] = _all_linear(config, live)
        return [one for one in live.modules if one in names and not _excluded(config, one)]
    return [one for one in live.modules if not _excluded(config, one) and _is_target(config, one)]


def targeted_parameters(config: AdapterConfig, live: LiveModel) -> dict[str, list[str]]:
    """Live names of targeted parameters, by their module, in the order in which it has them."""
    found: dict[str, list[str]] = {}
    for name in live.tensors:
        if _ends_with(name, config.target_parameters):
            found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def saved_modules(config: AdapterConfig, live: LiveModel) -> list[str]:
    """Modules that are stored whole. A suffix counts, even within a dotted part."""
    return [one for one in live.modules if one.endswith(config.modules_to_save)]


def token_modules(config: AdapterConfig, live: LiveModel) -> dict[str, tuple[int, ...]]:
    """Token ids by the module whose rows they are."""
    found: dict[str, tuple[int, ...]] = {}
    for suffix, rows in config.token_indices.items():
        for name in [live.input_embedding] if not suffix else live.modules:
            if name and name.endswith(suffix):
                found[name] = rows
    return found


def _is_target(config: AdapterConfig, name: str) -> bool:
    targets = config.target_modules
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    if name in targets:
        return True
    if not _ends_with(name, targets):
        return False
    if not config.layers_to_transform:
        return True
    layer = _layer(config, name)
    return layer is not None and layer in config.layers_to_transform


def _layer(config: AdapterConfig, name: str) -> int | None:
    """Number of the layer that a module lies in; the outermost one where lists are nested."""
    for one in config.layers_pattern or (r"[^.]*",):
        # Without a pattern, the list has to lie in something: peft asks for a dot before it.
        pattern = LAYER if config.layers_pattern else r".*?\.{}\.(\d+)\."
        match = re.match(pattern.replace("{}", one), name)
        if match:
            return int(match[match.re.groups])
    return None


def _excluded(config: AdapterConfig, name: str) -> bool:
    if isinstance(config.exclude_modules, str):
        if re.fullmatch(config.exclude_modules, name):
            return True
    elif _ends_with(name, config.exclude_modules):
        return True
    return any(re.match(SAVED.replace("{}", one), name) for one in config.modules_to_save)


def _all_linear(config: AdapterConfig, live: LiveModel) -> set[str]:
    head = live.output_embedding
    if not head and config.task_type == "SEQ_CLS":
        head = next((name for name in _HEADS if name in live.modules), "")
    return {name for name, kind in live.modules.items() if kind in (LINEAR, CONV1D)} - {head}


def _ends_with(name: str, suffixes: Iterable[str]) -> bool:
    """By whole dotted parts."""
    return any(name == one or name.endswith(f".{one}") for one in suffixes)
