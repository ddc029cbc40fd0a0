"""Read `adapter_config.json` of peft 0.21 as data, without importing peft.

Every setting that this project cannot merge is refused by name, with the reason and a way out.
Unknown settings that are not empty are refused too, since they might change the arithmetic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.weights.adapters.config_reader import LAYER, PATTERN, SAVED, ConfigReader, short

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
_READ = {
    "peft_type", "r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern",
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform",
    "layers_pattern", "modules_to_save", "trainable_token_indices", "bias", "lora_bias",
    "ensure_weight_tying", "init_lora_weights", "task_type", "peft_version",
}  # fmt: skip
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

    Attributes:
        rank: `r`.
        alpha: `lora_alpha`.
        rslora: `use_rslora`.
        dora: `use_dora`.
        target_modules: suffixes of module names, or a regular expression, or "all-linear".
        token_indices: `trainable_token_indices`: trained rows by name of the embedding; "" is the
            input embedding.
        tying: `ensure_weight_tying`.
        peft_version: version of peft that wrote the adapter; "" if it is not recorded.
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


def parse_config(raw: Mapping[str, Any]) -> tuple[AdapterConfig, list[str]]:
    """Return the configuration, and the reasons why it cannot be used (empty if it can)."""
    kind = raw.get("peft_type")
    if kind != "LORA":
        return AdapterConfig(), [
            f"peft_type={kind!r} is not LORA: merge it with peft's merge_and_unload, or train LoRA"
        ]
    findings = [*_refusals(raw), *_init_findings(raw)]
    reader = ConfigReader(raw, findings)
    config = AdapterConfig(
        rank=reader.positive("r", int, 8),
        alpha=reader.positive("lora_alpha", float, 8),
        rslora=reader.flag("use_rslora"),
        dora=reader.flag("use_dora"),
        rank_pattern=reader.patterns("rank_pattern", int),
        alpha_pattern=reader.patterns("alpha_pattern", float),
        target_modules=reader.names_or_regex("target_modules"),
        target_parameters=reader.names("target_parameters"),
        exclude_modules=reader.names_or_regex("exclude_modules"),
        layers_to_transform=reader.integers("layers_to_transform"),
        layers_pattern=reader.names("layers_pattern", LAYER),
        modules_to_save=reader.names("modules_to_save", SAVED),
        token_indices=reader.indices("trainable_token_indices"),
        bias=str(raw.get("bias") or "none"),
        lora_bias=reader.flag("lora_bias"),
        tying=reader.flag("ensure_weight_tying"),
        task_type=str(raw.get("task_type") or ""),
        peft_version=str(raw.get("peft_version") or ""),
    )
    if config.bias not in ("none", "all", "lora_only"):
        findings.append(f"bias={config.bias!r} is not one of none, all, lora_only")
    if config.dora and config.lora_bias:
        findings.append("use_dora and lora_bias exclude each other")
    if raw.get("target_modules") is None and not config.target_parameters:
        findings.append("target_modules is null: write out which modules the adapter is for")
    return config, findings


def _refusals(raw: Mapping[str, Any]) -> list[str]:
    known = _READ | _HARMLESS | set(_REFUSED)
    refused = [
        f"{key}={short(raw[key])} is not supported: {reason}"
        for key, reason in _REFUSED.items()
        if raw.get(key)
    ]
    return refused + [
        f"{key}={short(raw[key])} is not a LoRA setting of peft 0.21, so its effect is unknown"
        for key in sorted(set(raw) - known)
        if raw[key] not in (None, False, [], {}, "")
    ]


def _init_findings(raw: Mapping[str, Any]) -> list[str]:
    init = raw.get("init_lora_weights", True)
    saved = (
        "merge it into the base as training left it (get_base_model().save_pretrained), with "
        "init_lora_weights set to true in adapter_config.json"
    )
    if init == "loftq":  # peft cannot convert such an adapter to a plain LoRA
        return [
            f"init_lora_weights={init!r} replaced the base weights with 4-bit values, so "
            f"this adapter does not fit the base: {saved}"
        ]
    if isinstance(init, str) and init.startswith(_MUTATING):
        return [
            f"init_lora_weights={init!r} removed a part of the base weights, so this adapter does "
            "not fit the base: save it as a plain LoRA with save_pretrained(..., "
            f"path_initial_model_for_weight_conversion=INITIAL_ADAPTER), or {saved}"
        ]
    if not any(init is plain or init == plain for plain in _PLAIN_INIT):
        return [f"init_lora_weights={short(init)} is unknown"]
    return []
