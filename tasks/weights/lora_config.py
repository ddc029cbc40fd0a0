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

_HUGE = 1 << 31
_PEFT = "merge it with peft's merge_and_unload"
_REFUSED = {
    "layer_replication": "the model has more layers than the base; replicate the base first",
    "alora_invocation_tokens": "it acts on some tokens only, so no weight equals it: serve it "
    "unmerged",
    "use_qalora": "its A works on pooled inputs of a GPTQ layer, which no dense weight equals: "
    "serve it unmerged",
    "use_bdlora": f"its factors are block-diagonal: serve it unmerged, or {_PEFT}",
    "arrow_config": "a router picks experts for each token, so no single weight equals it: serve "
    "it unmerged",
    "kasa_config": f"it removed singular values from the base, which this merge does not: {_PEFT}",
    "megatron_config": "its layers are Megatron layers: convert it to the transformers model first",
}
_MUTATING = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisers (or their prefixes) that also change the base weights."""
_PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
_HARMLESS = {
    # Origin, training and initialisation: no effect on how the stored pair changes the weights.
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "lora_dropout", "megatron_core", "loftq_config", "eva_config", "corda_config",
    "lora_ga_config", "qalora_group_size", "runtime_config", "fan_in_fan_out",
    # Backward pass and noise in training: the stored pair is a plain one.
    "velora_config", "monteclora_config",
}  # fmt: skip


@dataclass(frozen=True)
class AdapterConfig:
    """The settings of an adapter that change its arithmetic; see peft's `LoraConfig`.

    `fan_in_fan_out` is absent: peft derives it from the type of each module, and so do we.
    `target_modules` and `exclude_modules` are suffixes of module names or a regular expression;
    `token_indices` are trained rows by name of the embedding, "" for the input embedding; `tying`
    is `ensure_weight_tying`; `peft_version` is "" if it is not recorded.
    """

    rank: int = 8
    alpha: float = 8
    rslora: bool = False
    dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    target_modules: tuple[str, ...] | str = ()
    target_parameters: tuple[str, ...] = ()
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    token_indices: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    bias: str = "none"
    lora_bias: bool = False
    tying: bool = False
    task_type: str = ""
    peft_version: str = ""

    def rank_of(self, name: str) -> int:
        """Return the rank of the pair on module (or parameter) `name`."""
        return int(_pick(self.rank_pattern, name, self.rank))

    def scale_of(self, name: str) -> float:
        """Return `alpha / rank` of module `name`, or `alpha / sqrt(rank)` for rsLoRA."""
        rank, alpha = self.rank_of(name), _pick(self.alpha_pattern, name, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank


def _pick(patterns: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the end of a name, in dotted parts."""
    for pattern, value in patterns.items():
        if re.match(PATTERN.replace("{}", pattern), name):
            return value
    return default


def _is_rank(value: Any) -> bool:
    return type(value) is int and 0 < value < _HUGE


def _is_alpha(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < _HUGE


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) and name for name in value)


def _is_names_or_text(value: Any) -> bool:
    return isinstance(value, str) or _is_names(value)


def _is_layers(value: Any) -> bool:
    numbers = [value] if type(value) is int else value
    return isinstance(numbers, list) and all(type(number) is int for number in numbers)


def _is_rows(value: Any) -> bool:
    """Return True for lists of distinct token ids by name of an embedding, or a bare list."""
    by_name = {"": value} if isinstance(value, list) else value
    return isinstance(by_name, dict) and all(
        isinstance(ids, list)
        and all(type(row) is int and row >= 0 for row in ids)
        and len(set(ids)) == len(ids)
        for ids in by_name.values()
    )


def _by_name(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


_NAMES, _FLAG = (
    (_is_names, "a list of names"),
    (lambda value: isinstance(value, bool), "true or false"),
)
_NAMES_OR_TEXT = (_is_names_or_text, "a list of names")
_SETTINGS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "r": (_is_rank, "a positive number"),
    "lora_alpha": (_is_alpha, "a positive number"),
    "use_rslora": _FLAG,
    "use_dora": _FLAG,
    "lora_bias": _FLAG,
    "ensure_weight_tying": _FLAG,
    "rank_pattern": (_by_name(_is_rank), "a mapping from names to positive numbers"),
    "alpha_pattern": (_by_name(_is_alpha), "a mapping from names to positive numbers"),
    "target_modules": _NAMES_OR_TEXT,
    "exclude_modules": _NAMES_OR_TEXT,
    "layers_pattern": _NAMES_OR_TEXT,
    "target_parameters": _NAMES,
    "modules_to_save": _NAMES,
    "layers_to_transform": (_is_layers, "a list of layer numbers"),
    "trainable_token_indices": (_is_rows, "lists of distinct token ids by name of an embedding"),
    "bias": (lambda value: value in ("none", "all", "lora_only"), "none, all, lora_only"),
}
"""Condition for the value of a setting, unless it is absent or empty, and its description."""
_READ = {*_SETTINGS, "peft_type", "init_lora_weights", "task_type", "peft_version"}
_DEFAULTS = {"r": 8, "lora_alpha": 8}


def parse_config(raw: Mapping[str, Any]) -> tuple[AdapterConfig, list[str]]:
    """Return the configuration, and the reasons why it cannot be used (empty if it can).

    A setting with a wrong value is a finding and reads as if it were absent.
    """
    kind = raw.get("peft_type")
    if kind != "LORA":
        return AdapterConfig(), [
            f"peft_type={kind!r} is not LORA: merge it with peft's merge_and_unload, or train LoRA"
        ]
    findings = [*_refusals(raw), *_init_findings(raw)]
    values: dict[str, Any] = {}
    for key, (fits, wanted) in _SETTINGS.items():
        value = raw.get(key, _DEFAULTS.get(key))
        is_empty = key not in _DEFAULTS and (value is None or value in ("", [], {}))
        problem = "" if is_empty or fits(value) else f"is not {wanted}"
        problem = problem or _regex_error(key, value)
        if problem:
            findings.append(f"{key}={_short(value)} {problem}")
        values[key] = _DEFAULTS.get(key) if problem or is_empty else value
    rows = values["trainable_token_indices"] or {}
    rows = {"": rows} if isinstance(rows, list) else rows
    config = AdapterConfig(
        rank=values["r"],
        alpha=values["lora_alpha"],
        rslora=bool(values["use_rslora"]),
        dora=bool(values["use_dora"]),
        rank_pattern=values["rank_pattern"] or {},
        alpha_pattern=values["alpha_pattern"] or {},
        target_modules=_names_or_regex(values["target_modules"]),
        target_parameters=tuple(values["target_parameters"] or ()),
        exclude_modules=_names_or_regex(values["exclude_modules"]),
        layers_to_transform=_as_tuple(values["layers_to_transform"], int),
        layers_pattern=_as_tuple(values["layers_pattern"], str),
        modules_to_save=tuple(values["modules_to_save"] or ()),
        token_indices={name: tuple(ids) for name, ids in rows.items()},
        bias=values["bias"] or "none",
        lora_bias=bool(values["lora_bias"]),
        tying=bool(values["ensure_weight_tying"]),
        task_type=str(raw.get("task_type") or ""),
        peft_version=str(raw.get("peft_version") or ""),
    )
    if config.dora and config.lora_bias:
        findings.append("use_dora and lora_bias exclude each other")
    if raw.get("target_modules") is None and not config.target_parameters:
        findings.append("target_modules is null: write out which modules the adapter is for")
    return config, findings


def _as_tuple(value: Any, single: type) -> tuple[Any, ...]:
    return (value,) if type(value) is single else tuple(value or ())


def _names_or_regex(value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str):
        return ALL_LINEAR if value.lower() == ALL_LINEAR else value
    return tuple(value or ())


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _regex_error(key: str, value: Any) -> str:
    """Return the reason why a part of a setting is no regular expression; "" if all are."""
    frame = {"rank_pattern": PATTERN, "alpha_pattern": PATTERN, "layers_pattern": LAYER,
             "modules_to_save": SAVED}.get(key)  # fmt: skip
    if frame is None and not (key.endswith("_modules") and isinstance(value, str)):
        return ""
    for text in [value] if isinstance(value, str) else value or ():
        try:
            re.compile((frame or "{}").replace("{}", text))
        except re.error as error:
            return f"has {_short(text)}, which is not a regular expression: {error}"
    return ""


def _refusals(raw: Mapping[str, Any]) -> Iterator[str]:
    for key, reason in _REFUSED.items():
        if raw.get(key):
            yield f"{key}={_short(raw[key])} is not supported: {reason}"
    for key in sorted(set(raw) - _READ - _HARMLESS - set(_REFUSED)):
        if raw[key] not in (None, False, [], {}, ""):
            yield f"{key}={_short(raw[key])} is no LoRA setting of peft 0.21: its effect is unknown"


def _init_findings(raw: Mapping[str, Any]) -> Iterator[str]:
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
        yield f"init_lora_weights={_short(init)} is unknown"


_LINEAR = ("linear", "conv1d")
_HEADS = ("score", "classifier")


def targeted_modules(
    config: AdapterConfig, modules: Mapping[str, str], head: str = ""
) -> list[str]:
    """Return the modules with a LoRA pair, in the model's order."""
    if config.target_modules == ALL_LINEAR:
        if not head and config.task_type == "SEQ_CLS":
            head = next((name for name in _HEADS if name in modules), "")
        targets = [name for name, kind in modules.items() if kind in _LINEAR and name != head]
    else:
        targets = [name for name in modules if _is_target(config, name)]
    return [name for name in targets if not _is_excluded(config, name)]


def _is_target(config: AdapterConfig, name: str) -> bool:
    targets = config.target_modules
    if isinstance(targets, str):
        return re.fullmatch(targets, name) is not None
    if name in targets:
        return True
    if not ends_with(name, targets):
        return False
    return not config.layers_to_transform or _layer(config, name) in config.layers_to_transform


def _layer(config: AdapterConfig, name: str) -> int | None:
    """Return the number of a module's layer, the outermost one if layers are nested."""
    for layers in config.layers_pattern or (r"[^.]*",):
        # Without layers_pattern, peft needs a dot before the name of the list of layers.
        pattern = LAYER if config.layers_pattern else r".*?\.{}\.(\d+)\."
        match = re.match(pattern.replace("{}", layers), name)
        if match:
            return int(match[match.re.groups])
    return None


def _is_excluded(config: AdapterConfig, name: str) -> bool:
    if isinstance(config.exclude_modules, str):
        if re.fullmatch(config.exclude_modules, name):
            return True
    elif ends_with(name, config.exclude_modules):
        return True
    return any(re.match(SAVED.replace("{}", module), name) for module in config.modules_to_save)


def ends_with(name: str, suffixes: Iterable[str]) -> bool:
    """Return True if a name ends with one of the suffixes, in whole dotted parts."""
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)
