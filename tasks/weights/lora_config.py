"""Read `adapter_config.json` of peft 0.21 as data, and find the modules that it targets.

peft itself is not imported, because that takes seconds; the tests compare with the modules that it
wraps. Every setting that cannot be merged is refused by name, with the reason and a way out.
Unknown settings that are not empty are refused too, since they might change the arithmetic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ALL_LINEAR = "all-linear"
"""peft's shorthand for all linear layers but the head; case does not matter."""

# Regular expressions that peft builds from names in a configuration; "{}" is the name.
PATTERN = r"(.*\.)?({})$"
SAVED = r"(^|.*\.){}($|\..*)"
LAYER = r"(?:^|.*?\.){}\.(\d+)\."

_HUGE, _POSITIVE = 1 << 31, "a positive number"
_PEFT = "merge it with peft's merge_and_unload, or serve it unmerged"
_REFUSED = {
    "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config",
    "kasa_config", "megatron_config", "lora_bias", "velora_config", "monteclora_config",
}  # fmt: skip
"""Settings with which no merge of ours equals the adapter."""
_MUTATING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisers (or their prefixes) that also change the base weights."""
_PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_HARMLESS = {
    # Origin, training and initialisation: no effect on how the stored pair changes the weights.
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config", "fan_in_fan_out",
}  # fmt: skip


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of an adapter that change its arithmetic, named as in peft's `LoraConfig`.

    `fan_in_fan_out` is absent: peft derives it from the type of each module, and so do we.
    `target_modules` and `exclude_modules` are suffixes of module names or a regular expression;
    `trainable_token_indices` are trained rows by name of the embedding, "" for the input embedding.
    """

    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: tuple[str, ...] | str = ()
    target_parameters: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    trainable_token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    bias: str = "none"
    ensure_weight_tying: bool = False
    task_type: str = ""
    peft_version: str = ""

    def rank_of(self, name: str) -> int:
        """Return the rank of the pair on module (or parameter) `name`."""
        return int(_pick(self.rank_pattern, name, self.r))

    def scale_of(self, name: str) -> float:
        """Return `alpha / rank` of module `name`, or `alpha / sqrt(rank)` for rsLoRA."""
        rank, alpha = self.rank_of(name), _pick(self.alpha_pattern, name, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _pick(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a name, in dotted parts."""
    for pattern, value in patterns.items():
        if re.match(PATTERN.replace("{}", pattern), name):
            return value
    return default


def _checked(is_right: Callable[[Any], bool], what: str) -> Callable[[Any], Any]:
    """Return a function that returns a right value, and raises ValueError for any other."""

    def convert(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(f"is not {what}")
        return value

    return convert


_flag = _checked(lambda value: isinstance(value, bool), "true or false")
_number = _checked(lambda value: type(value) in (int, float) and 0 < value < _HUGE, _POSITIVE)
_rank = _checked(lambda value: type(value) is int and 0 < value < _HUGE, _POSITIVE)
_bias = _checked(("none", "all", "lora_only").__contains__, "one of none, all, lora_only")


def _names(value: Any, frame: str = "") -> tuple[str, ...]:
    """Return a list of names; `frame` is the regular expression that peft builds from each."""
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("is not a list of names")
    for name in value if frame else ():
        re.compile(frame.replace("{}", name))
    return tuple(value)


def _modules(value: Any) -> tuple[str, ...] | str:
    if not isinstance(value, str):
        return _names(value)
    re.compile(value)
    return ALL_LINEAR if value.lower() == ALL_LINEAR else value


def _layers(value: Any) -> tuple[int, ...]:
    numbers = value if isinstance(value, list) else [value]
    if not all(type(number) is int for number in numbers):
        raise ValueError("is not a list of layer numbers")
    return tuple(numbers)


def _rows(value: Any) -> dict[str, tuple[int, ...]]:
    """Return distinct token ids by name of an embedding; "" for those of a bare list."""
    by_name = {"": value} if isinstance(value, list) else dict(value)
    for ids in by_name.values():
        if not all(type(row) is int and row >= 0 for row in ids) or len(set(ids)) < len(ids):
            raise ValueError("is not a list of distinct token ids")
    return {name: tuple(ids) for name, ids in by_name.items()}


def _patterns(value: Any, convert: Callable[[Any], Any]) -> dict[str, Any]:
    _names(list(value), PATTERN)
    return {name: convert(each) for name, each in value.items()}


_SETTINGS: Mapping[str, Callable[[Any], Any]] = {
    "r": _rank,
    "lora_alpha": _number,
    "use_rslora": _flag,
    "use_dora": _flag,
    "ensure_weight_tying": _flag,
    "rank_pattern": lambda value: _patterns(value, _rank),
    "alpha_pattern": lambda value: _patterns(value, _number),
    "target_modules": _modules,
    "exclude_modules": _modules,
    "target_parameters": _names,
    "modules_to_save": lambda value: _names(value, SAVED),
    "layers_to_transform": _layers,
    "layers_pattern": lambda value: _names([value] if isinstance(value, str) else value, LAYER),
    "trainable_token_indices": _rows,
    "bias": _bias,
    "task_type": str,
    "peft_version": str,
}
"""Conversion of each field of `AdapterConfig`; raises ValueError for a wrong value."""
_READ = {*_SETTINGS, "peft_type", "init_lora_weights"}


def parse_config(raw: Mapping[str, Any]) -> tuple[AdapterConfig, list[str]]:
    """Return the configuration, and the reasons why it cannot be used (empty if it can).

    A setting with a wrong value is a finding and reads as if it were absent.
    """
    kind = raw.get("peft_type")
    if kind != "LORA":
        return AdapterConfig(), [f"peft_type={kind!r} is not LORA: {_PEFT}, or train LoRA"]
    findings = list(_refusals(raw))
    values: dict[str, Any] = {}
    for key, convert in _SETTINGS.items():
        value = raw.get(key)
        if value is None or value in ("", [], {}):
            continue
        try:
            values[key] = convert(value)
        except (ValueError, TypeError, AttributeError, re.error) as error:
            findings.append(f"{key}={value!r:.60}: {error}")
    config = AdapterConfig(**values)
    if raw.get("target_modules") is None and not config.target_parameters:
        findings.append("target_modules is null: write out which modules the adapter is for")
    return config, findings


def _refusals(raw: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(_REFUSED & set(raw)):
        if raw[key]:
            yield f"{key}={raw[key]!r:.60} is not supported: {_PEFT}"
    for key in sorted(set(raw) - _READ - _HARMLESS - _REFUSED):
        if raw[key] not in (None, False, [], {}, ""):
            yield f"{key}={raw[key]!r:.60} is no LoRA setting of peft 0.21: its effect is unknown"
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.startswith(_MUTATING):
        plain = "save it as a plain LoRA (path_initial_model_for_weight_conversion), or "
        yield (
            f"init_lora_weights={init!r} changed the base weights: this adapter does not fit the "
            f"base: {'' if init == 'loftq' else plain}merge it into the base as training left it "
            "(get_base_model().save_pretrained), with init_lora_weights set to true in "
            "adapter_config.json"
        )
    elif not any(init is plain or init == plain for plain in _PLAIN_INIT):
        yield f"init_lora_weights={init!r:.60} is unknown"


def targeted_modules(
    config: AdapterConfig, modules: Mapping[str, str], head: str = ""
) -> list[str]:
    """Return the modules with a LoRA pair, in the model's order; `modules` has kinds by name."""
    if config.target_modules == ALL_LINEAR:
        if not head and config.task_type == "SEQ_CLS":
            head = next((name for name in ("score", "classifier") if name in modules), "")
        linear = ("linear", "conv1d")
        targets = [name for name, kind in modules.items() if kind in linear and name != head]
    else:
        targets = [name for name in modules if _is_target(config, name)]
    return [name for name in targets if not _is_excluded(config, name)]


def _is_target(config: AdapterConfig, name: str) -> bool:
    targets, layers = config.target_modules, config.layers_to_transform
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    if name in targets or not ends_with(name, targets):
        return name in targets
    return not layers or _layer(config, name) in layers


def _layer(config: AdapterConfig, name: str) -> int | None:
    """Return the number of a module's layer, the outermost one if layers are nested."""
    for layers in config.layers_pattern or (r"[^.]*",):
        # Without layers_pattern, peft needs a dot before the name of the list of layers.
        pattern = LAYER if config.layers_pattern else r".*?\.{}\.(\d+)\."
        if match := re.match(pattern.replace("{}", layers), name):
            return int(match[match.re.groups])
    return None


def _is_excluded(config: AdapterConfig, name: str) -> bool:
    excluded, saved = config.exclude_modules, config.modules_to_save
    if isinstance(excluded, str):
        is_named = bool(excluded) and re.fullmatch(excluded, name) is not None
    else:
        is_named = ends_with(name, excluded)
    return is_named or any(re.match(SAVED.replace("{}", module), name) for module in saved)


def ends_with(name: str, suffixes: Iterable[str]) -> bool:
    """Return True if a name ends with one of the suffixes, in whole dotted parts."""
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)
