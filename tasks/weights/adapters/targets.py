"""Find the modules and parameters that an adapter targets, by peft's rules.

peft itself is not imported, because that takes seconds. The tests compare with the modules that
peft wraps.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tasks.weights.adapters.config import AdapterConfig
from tasks.weights.adapters.config_reader import ALL_LINEAR, LAYER, SAVED
from tasks.weights.adapters.live import CONV1D, LINEAR, LiveModel

_HEADS = ("score", "classifier")


def targeted_modules(config: AdapterConfig, live: LiveModel) -> list[str]:
    """Return the modules with a LoRA pair, in the model's order."""
    if config.target_modules == ALL_LINEAR:
        names: set[str] = _all_linear(config, live)
        return [name for name in live.modules if name in names and not _excluded(config, name)]
    return [
        name for name in live.modules if not _excluded(config, name) and _is_target(config, name)
    ]


def targeted_parameters(config: AdapterConfig, live: LiveModel) -> dict[str, list[str]]:
    """Return the live names of targeted parameters by module, in the module's order."""
    by_module: dict[str, list[str]] = {}
    for name in live.tensors:
        if _ends_with(name, config.target_parameters):
            by_module.setdefault(name.rpartition(".")[0], []).append(name)
    return by_module


def saved_modules(config: AdapterConfig, live: LiveModel) -> list[str]:
    """Return the modules of `modules_to_save`: any module whose name ends with one of its names."""
    return [name for name in live.modules if name.endswith(config.modules_to_save)]


def token_modules(config: AdapterConfig, live: LiveModel) -> dict[str, tuple[int, ...]]:
    """Return the trained token ids by embedding module."""
    rows_of: dict[str, tuple[int, ...]] = {}
    for suffix, rows in config.token_indices.items():
        for name in [live.input_embedding] if not suffix else live.modules:
            if name and name.endswith(suffix):
                rows_of[name] = rows
    return rows_of


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
    """Return the number of a module's layer, the outermost one if layers are nested."""
    for layers in config.layers_pattern or (r"[^.]*",):
        # Without layers_pattern, peft needs a dot before the name of the list of layers.
        pattern = LAYER if config.layers_pattern else r".*?\.{}\.(\d+)\."
        match = re.match(pattern.replace("{}", layers), name)
        if match:
            return int(match[match.re.groups])
    return None


def _excluded(config: AdapterConfig, name: str) -> bool:
    if isinstance(config.exclude_modules, str):
        if re.fullmatch(config.exclude_modules, name):
            return True
    elif _ends_with(name, config.exclude_modules):
        return True
    return any(re.match(SAVED.replace("{}", module), name) for module in config.modules_to_save)


def _all_linear(config: AdapterConfig, live: LiveModel) -> set[str]:
    head = live.output_embedding
    if not head and config.task_type == "SEQ_CLS":
        head = next((name for name in _HEADS if name in live.modules), "")
    return {name for name, kind in live.modules.items() if kind in (LINEAR, CONV1D)} - {head}


def _ends_with(name: str, suffixes: Iterable[str]) -> bool:
    """Return True if a name ends with one of the suffixes, in whole dotted parts."""
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)
