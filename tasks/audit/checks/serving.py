"""Check what vLLM refuses: unknown classes, and adapters that it cannot apply."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tasks.audit.catalogue.adapters import Serving
from tasks.audit.checks.adapters.adapter_keys import sort_keys
from tasks.audit.config_fields import texts, whole
from tasks.audit.finding import Finding, Severity
from tasks.audit.known import DEFAULT_LORA_RANK, known
from tasks.audit.recognise import ADAPTER_CONFIG, CONFIG
from tasks.audit.source import Source

_HEADS = ("classifier", "score")
_PLAIN_INIT = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Initialisers that do not change the base (`PEFTHelper._init_is_supported` of vLLM)."""
_WITH_PEFT = "serve it with transformers and peft, or train plain LoRA"
_FEATURES = {
    "lora_bias": "if every targeted layer of the base has a bias, merge it: python "
    f"flows/deliver.py source=DIR base=BASE; else {_WITH_PEFT}",
    "alora_invocation_tokens": "it acts only on some tokens, so it cannot be merged: " + _WITH_PEFT,
    "layer_replication": "replicate the layers of the base first, and merge it into the result",
    "use_bdlora": f"merge it with peft's merge_and_unload, or {_WITH_PEFT}",
    "use_qalora": f"it cannot be merged: {_WITH_PEFT}",
}
"""Settings that vLLM refuses, and what to do instead."""
_INIT_FIX = (
    "save it as a plain LoRA with save_pretrained(..., "
    "path_initial_model_for_weight_conversion=INITIAL_ADAPTER), or merge it into the base as "
    "training changed it, saved with get_base_model().save_pretrained"
)
_REQUIRED = ("r", "lora_alpha", "target_modules")
"""Settings for which peft has a default and vLLM has none (`PEFTHelper.from_dict`)."""
_TOWER = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|audio_tower|vision_encoder|multi_modal_projector"
    r"|image_tower|mlp1)\."
)
_MOST = 200
_EMBEDDING_OF_BASE = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")


def check(source: Source) -> Iterator[Finding]:
    """Check a model's class, or an adapter's settings and keys."""
    if source.is_model:
        yield from _architecture(source.config())
    if source.is_adapter and source.config(ADAPTER_CONFIG).get("peft_type") == "LORA":
        yield from _settings(source.config(ADAPTER_CONFIG))
        yield from _keys(source)


def _architecture(config: Mapping[str, Any]) -> Iterator[Finding]:
    names, lists = texts(config.get("architectures")), known()
    if not names or any(lists.serves(name) for name in names) or "CriticModel" in names:
        return  # a critic is not served: HEAD_OF_CRITIC
    last = next((lists.last_version[name] for name in names if name in lists.last_version), "")
    if last:
        expected = f"a class of vLLM {lists.vllm}; {last} was the last version that had this one"
        severity = Severity.WARNING
    elif any(name in lists.classes for name in names):
        expected = f"a class of vLLM {lists.vllm}; it may run the class of transformers"
        severity = Severity.WARNING
    elif config.get("auto_map"):
        expected = f"a class of vLLM {lists.vllm}; this one needs --trust-remote-code"
        severity = Severity.WARNING
    else:
        expected, severity = f"a class of vLLM {lists.vllm} or of transformers", Severity.ERROR
    yield Serving.VLLM_ARCHITECTURE.at(
        CONFIG, found=f"architectures {', '.join(names)}", expected=expected, severity=severity
    )


def _settings(raw: Mapping[str, Any]) -> Iterator[Finding]:
    ranks = raw.get("rank_pattern")
    all_ranks = [raw.get("r"), *(ranks.values() if isinstance(ranks, Mapping) else ())]
    highest = max((rank for rank in map(whole, all_ranks) if rank is not None), default=0)
    if highest > DEFAULT_LORA_RANK:
        allowed = next((rank for rank in known().lora_ranks if rank >= highest), None)
        yield Serving.VLLM_LORA_RANK.at(
            ADAPTER_CONFIG, found=f"rank {highest}",
            expected=f"{DEFAULT_LORA_RANK}, the default, or --max-lora-rank {allowed}" if allowed
            else f"at most {known().lora_ranks[-1]}: merge it",
            fix=f"vllm serve BASE --enable-lora --max-lora-rank {allowed}" if allowed else "",
        )  # fmt: skip
    if raw.get("use_dora"):
        yield Serving.VLLM_LORA_DORA.at(
            ADAPTER_CONFIG, found="use_dora true", expected="plain LoRA"
        )
    saved = [name for name in texts(raw.get("modules_to_save")) if name not in _HEADS]
    if saved:
        yield Serving.VLLM_LORA_MODULES_TO_SAVE.at(
            ADAPTER_CONFIG, found=f"modules_to_save {', '.join(saved)}",
            expected="none, or a classification head",
        )  # fmt: skip
    yield from _features(raw)


def _features(raw: Mapping[str, Any]) -> Iterator[Finding]:
    init = raw.get("init_lora_weights")
    odd = {
        f"{setting} {raw[setting]!r}": fix for setting, fix in _FEATURES.items() if raw.get(setting)
    }
    if isinstance(init, str) and init.lower() not in _PLAIN_INIT:
        odd[f"init_lora_weights {init!r}"] = _INIT_FIX
    if raw.get("bias") not in (None, "none"):
        odd[f"bias {raw['bias']!r}"] = ""
    for setting, fix in odd.items():
        yield Serving.VLLM_LORA_FEATURE.at(
            ADAPTER_CONFIG, found=setting, expected="not set", fix=fix
        )
    absent = [setting for setting in _REQUIRED if setting not in raw]
    if absent:
        yield Serving.VLLM_LORA_FEATURE.at(
            ADAPTER_CONFIG, found=f"no {', '.join(absent)}", expected="set explicitly"
        )


def _keys(source: Source) -> Iterator[Finding]:
    keys = sort_keys(source.tensors)
    saved = texts(source.config(ADAPTER_CONFIG).get("modules_to_save"))[:_MOST]
    named = [*_HEADS, *saved]  # vLLM loads heads; `_settings` reports other modules
    odd = [keys.keys[name] for name in keys.tokens]
    for name in islice(keys.whole, _MOST * _MOST):
        key = keys.keys[name]
        if not key.endswith(_EMBEDDING_OF_BASE) and not any(
            f".{part}." in f".{name}" for part in named
        ):
            odd.append(key)
    yield from Serving.VLLM_LORA_KEY.of(
        source, odd, found=f"{len(odd)} tensors outside LoRA pairs",
        expected="only lora_A and lora_B",
    )  # fmt: skip
    towers = [name for name in keys.pairs if _TOWER.search(name)]
    if towers:
        yield Serving.VLLM_LORA_TOWER.at(
            keys.pairs[towers[0]].file, towers, found=f"{len(towers)} pairs on a tower",
            expected="pairs on the language model",
        )  # fmt: skip
