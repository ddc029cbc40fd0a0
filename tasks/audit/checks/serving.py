"""What vLLM refuses: classes that it does not have, adapters that it cannot apply."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tasks.audit.catalogue import serving as say
from tasks.audit.checks.adapters.adapter_keys import sort_keys
from tasks.audit.config_fields import texts, whole
from tasks.audit.finding import Finding, Severity
from tasks.audit.known import DEFAULT_LORA_RANK, known
from tasks.audit.recognise import ADAPTER_CONFIG, CONFIG
from tasks.audit.source import Source

_HEADS = ("classifier", "score")
_PLAIN_INIT = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""Initialisers that vLLM knows to leave the base as it is (`PEFTHelper._init_is_supported`)."""
_WITH_PEFT = "serve it with transformers and peft, or train plain LoRA"
_FEATURES = {
    "lora_bias": "where every targeted layer of the base has a bias it can be merged: python "
    f"flows/deliver.py source=DIR base=BASE; else {_WITH_PEFT}",
    "alora_invocation_tokens": "it acts on some tokens only, so no merged weight equals it: "
    + _WITH_PEFT,
    "layer_replication": "replicate the layers of the base first, and merge it into that",
    "use_bdlora": f"merge it with peft's merge_and_unload, or {_WITH_PEFT}",
    "use_qalora": f"no dense weight equals it: {_WITH_PEFT}",
}
"""Settings that vLLM refuses, and what helps instead."""
_INIT_FIX = (
    "save it as a plain LoRA with save_pretrained(..., "
    "path_initial_model_for_weight_conversion=INITIAL_ADAPTER), or merge it into the base as "
    "training left it: that of get_base_model().save_pretrained"
)
_REQUIRED = ("r", "lora_alpha", "target_modules")
"""Settings for which vLLM has no default, as peft has (`PEFTHelper.from_dict`)."""
_TOWER = re.compile(
    r"(^|\.)(visual|vision_tower|vision_model|audio_tower|vision_encoder|multi_modal_projector"
    r"|image_tower|mlp1)\."
)
_MOST = 200
_EMBEDDING_OF_BASE = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")


def check(source: Source) -> Iterator[Finding]:
    """A model's class; an adapter's settings and keys."""
    if source.is_model:
        yield from _architecture(source.config())
    if source.is_adapter and source.config(ADAPTER_CONFIG).get("peft_type") == "LORA":
        yield from _settings(source.config(ADAPTER_CONFIG))
        yield from _keys(source)


def _architecture(config: Mapping[str, Any]) -> Iterator[Finding]:
    names, lists = texts(config.get("architectures")), known()
    if not names or any(lists.serves(one) for one in names) or "CriticModel" in names:
        return  # a critic is no model to serve: HEAD_OF_CRITIC
    last = next((lists.last_version[one] for one in names if one in lists.last_version), "")
    if last:
        expected = f"a class of vLLM {lists.vllm}; {last} was the last version that had this one"
        severity = Severity.WARNING
    elif any(one in lists.classes for one in names):
        expected = f"a class of vLLM {lists.vllm}; it may run transformers' own"
        severity = Severity.WARNING
    elif config.get("auto_map"):
        expected = f"a class of vLLM {lists.vllm}; it needs --trust-remote-code"
        severity = Severity.WARNING
    else:
        expected, severity = f"a class of vLLM {lists.vllm} or of transformers", Severity.ERROR
    yield say.VLLM_ARCHITECTURE.at(
        CONFIG, found=f"architectures {', '.join(names)}", expected=expected, severity=severity
    )


def _settings(raw: Mapping[str, Any]) -> Iterator[Finding]:
    ranks = raw.get("rank_pattern")
    given = [raw.get("r"), *(ranks.values() if isinstance(ranks, Mapping) else ())]
    highest = max((one for one in map(whole, given) if one is not None), default=0)
    if highest > DEFAULT_LORA_RANK:
        able = next((one for one in known().lora_ranks if one >= highest), None)
        yield say.VLLM_LORA_RANK.at(
            ADAPTER_CONFIG, found=f"rank {highest}",
            expected=f"{DEFAULT_LORA_RANK}, the default, or --max-lora-rank {able}" if able
            else f"at most {known().lora_ranks[-1]}: merge it",
            fix=f"vllm serve BASE --enable-lora --max-lora-rank {able}" if able else "",
        )  # fmt: skip
    if raw.get("use_dora"):
        yield say.VLLM_LORA_DORA.at(ADAPTER_CONFIG, found="use_dora true", expected="plain LoRA")
    saved = [one for one in texts(raw.get("modules_to_save")) if one not in _HEADS]
    if saved:
        yield say.VLLM_LORA_MODULES_TO_SAVE.at(
            ADAPTER_CONFIG, found=f"modules_to_save {', '.join(saved)}",
            expected="none, or a classification head",
        )  # fmt: skip
    yield from _features(raw)


def _features(raw: Mapping[str, Any]) -> Iterator[Finding]:
    init = raw.get("init_lora_weights")
    odd = {f"{one} {raw[one]!r}": fix for one, fix in _FEATURES.items() if raw.get(one)}
    if isinstance(init, str) and init.lower() not in _PLAIN_INIT:
        odd[f"init_lora_weights {init!r}"] = _INIT_FIX
    if raw.get("bias") not in (None, "none"):
        odd[f"bias {raw['bias']!r}"] = ""
    for one, fix in odd.items():
        yield say.VLLM_LORA_FEATURE.at(ADAPTER_CONFIG, found=one, expected="not set", fix=fix)
    absent = [one for one in _REQUIRED if one not in raw]
    if absent:
        yield say.VLLM_LORA_FEATURE.at(
            ADAPTER_CONFIG, found=f"no {', '.join(absent)}", expected="written out"
        )


def _keys(source: Source) -> Iterator[Finding]:
    keys = sort_keys(source.tensors)
    saved = texts(source.config(ADAPTER_CONFIG).get("modules_to_save"))[:_MOST]
    named = [*_HEADS, *saved]  # heads are taken, other modules are said by their setting
    odd = [keys.keys[one] for one in keys.tokens]
    for name in islice(keys.whole, _MOST * _MOST):
        key = keys.keys[name]
        if not key.endswith(_EMBEDDING_OF_BASE) and not any(f".{o}." in f".{name}" for o in named):
            odd.append(key)
    if odd:
        yield say.VLLM_LORA_KEY.at(
            source.tensors[odd[0]].file, odd, found=f"{len(odd)} tensors that are no LoRA pair",
            expected="lora_A and lora_B alone",
        )  # fmt: skip
    towers = [one for one in keys.pairs if _TOWER.search(one)]
    if towers:
        held = keys.pairs[towers[0]].held
        yield say.VLLM_LORA_TOWER.at(
            held.file if held else "", towers, found=f"{len(towers)} pairs on a tower",
            expected="pairs on the language model",
        )  # fmt: skip
