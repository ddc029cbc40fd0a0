"""Check a PEFT adapter by itself: its settings, and its tensors against the settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from tasks.audit.catalogue.adapters import Adapters
from tasks.audit.checks.adapters.adapter_keys import sort_keys
from tasks.audit.checks.adapters.adapter_tensors import (
    check_gaps,
    check_tensors,
    oversized_settings,
)
from tasks.audit.config_fields import texts
from tasks.audit.finding import Finding
from tasks.audit.recognise import ADAPTER_CONFIG, CONFIG, Kind
from tasks.audit.source import Source
from tasks.weights.adapters.config import parse_config
from tasks.weights.heads.folder import SIDE_FILES

_MUTATING = ("pissa", "olora", "corda", "loftq")


def check(source: Source) -> Iterator[Finding]:
    """Check the adapter type, the settings, then the tensors."""
    raw = source.config(ADAPTER_CONFIG)
    if source.kind is Kind.SHARDS and raw:
        yield from _settings(raw)  # gathering uses these settings
    if not source.is_adapter:
        return
    yield from _folder(source)
    if not raw:
        return
    if raw.get("peft_type") != "LORA":
        yield Adapters.ADAPTER_TYPE.at(
            ADAPTER_CONFIG, found=f"peft_type {raw.get('peft_type')!r}", expected="'LORA'"
        )
        return
    yield from _settings(raw)
    if oversized_settings(raw) or not source.weights.is_whole or not source.tensors:
        return
    config, _ = parse_config(raw)
    if any(name in source.folder.files for name in SIDE_FILES):  # LLaMA-Factory's value head
        saved = tuple(name for name in config.modules_to_save if name != "v_head")
        config = replace(config, modules_to_save=saved)
    keys = sort_keys(source.tensors)
    yield from check_tensors(keys, config)
    if source.base is None:
        yield from check_gaps(keys, config)


def _folder(source: Source) -> Iterator[Finding]:
    name = source.config(ADAPTER_CONFIG).get("base_model_name_or_path")
    yield Adapters.ADAPTER_IS_NO_MODEL.at(
        "",
        found="an adapter",
        expected=f"to be served with its base, {name or 'which it does not name'}",
    )
    if CONFIG in source.folder.files:
        yield Adapters.CONFIG_BESIDE_ADAPTER.at(
            CONFIG, found="present", expected=f"only {ADAPTER_CONFIG}"
        )


def _settings(raw: Mapping[str, Any]) -> Iterator[Finding]:
    for key in ("r", "lora_alpha"):
        value = raw.get(key, 8)
        number = type(value) is int or (key == "lora_alpha" and type(value) is float)
        if not number or not value > 0:
            is_alpha = key == "lora_alpha" and number
            entry = Adapters.ADAPTER_ALPHA if is_alpha else Adapters.ADAPTER_CONFIG
            yield entry.at(ADAPTER_CONFIG, found=f"{key} {value!r}", expected="a positive number")
    for key, most in oversized_settings(raw).items():
        yield Adapters.ADAPTER_CONFIG.at(
            ADAPTER_CONFIG, found=f"{len(raw[key])} {key}", expected=f"up to {most}"
        )
    targets = raw.get("target_modules")
    if not (texts(targets) or raw.get("target_parameters") or raw.get("trainable_token_indices")):
        yield Adapters.ADAPTER_CONFIG.at(
            ADAPTER_CONFIG, found=f"target_modules {targets!r}", expected="names, or a pattern"
        )
    if not raw.get("base_model_name_or_path"):
        yield Adapters.ADAPTER_BASE_UNSAID.at(
            ADAPTER_CONFIG, found="base_model_name_or_path is empty", expected="the base's name"
        )
    init = raw.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_MUTATING):
        yield Adapters.ADAPTER_INIT.at(
            ADAPTER_CONFIG, found=f"init_lora_weights {init!r}", expected="true, or gaussian"
        )
