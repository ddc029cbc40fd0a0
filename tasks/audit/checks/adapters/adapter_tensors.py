"""Check the tensors of an adapter against its settings, without the base."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tasks.audit.catalogue.adapters import Adapters
from tasks.audit.checks.adapters.adapter_keys import AdapterKeys, layer_of, pattern_of, plain_module
from tasks.audit.finding import Finding, Severity, some
from tasks.audit.recognise import ADAPTER_CONFIG
from tasks.weights.adapters.config import AdapterConfig
from tasks.weights.adapters.config_reader import PATTERN

_HEADS = ("classifier", "score")
"""peft adds both to modules_to_save for a classifier, which has one of them."""
_EMBEDDINGS = ("embed_tokens", "lm_head", "wte", "word_embeddings", "embed_in", "embed_out")
"""Modules that `save_embedding_layers="auto"` stores in full when the vocabulary has grown."""
_OTHER_FAMILIES = ("v_head", *_HEADS)
"""Heads, which `checks/heads.py` covers."""
_MOST = {
    "modules_to_save": 200,
    "layers_pattern": 200,
    "rank_pattern": 20_000,
    "alpha_pattern": 20_000,
}
_MOST_WHOLE = 20_000
_MOST_PATTERNS = 400
"""Python caches about 500 compiled patterns."""
_DEEPEST = 32
"""Most parts of a module's name to compare."""


def check_tensors(keys: AdapterKeys, config: AdapterConfig) -> Iterator[Finding]:
    """Check LoRA pairs, then tensors that are stored in full."""
    yield from _halves(keys)
    if len(config.rank_pattern) <= _MOST_PATTERNS and is_cheap(*config.rank_pattern):
        yield from _ranks(keys, config)
    yield from _patterns(keys, config)
    yield from _dora(keys, config)
    yield from _targets(keys, config)
    yield from _saved(keys, config)
    yield from _unexplained(keys, config)
    yield from _tokens(keys, config)


def _patterns(keys: AdapterKeys, config: AdapterConfig) -> Iterator[Finding]:
    """Report patterns that match no pair; names of targeted parameters are not in the keys."""
    if config.target_parameters:
        return
    names = [plain_module(name) for name in keys.pairs]
    for setting in ("rank_pattern", "alpha_pattern"):
        patterns = [*getattr(config, setting)][:_MOST_PATTERNS]
        dead = [
            pattern for pattern in patterns
            if is_cheap(pattern)
            and not any(re.match(PATTERN.replace("{}", pattern), name) for name in names)
        ]  # fmt: skip
        if dead and names:
            yield Adapters.ADAPTER_PATTERN.at(
                ADAPTER_CONFIG, found=f"{setting}: {some(dead)}", expected="names of its modules"
            )


def oversized_settings(raw: Mapping[str, Any]) -> dict[str, int]:
    """Return settings with too many entries, and the largest accepted number of each.

    Each entry is a regular expression that is compiled and tried on every module.

    Args:
        raw: adapter_config.json.
    """
    return {
        key: most
        for key, most in _MOST.items()
        if isinstance(raw.get(key), list | Mapping) and len(raw[key]) > most
    }


def is_cheap(*patterns: str) -> bool:
    """Return True if no pattern can take long to match; untrusted regular expressions can."""
    return not any(re.search(r"[*+{(]", pattern) for pattern in patterns)


def _halves(keys: AdapterKeys) -> Iterator[Finding]:
    for half, other_half in (("A", "B"), ("B", "A")):
        alone = [
            name
            for name, pair in keys.pairs.items()
            if getattr(pair, half.lower()) and not getattr(pair, other_half.lower())
        ]
        if alone:
            count = f"{len(alone)} lora_{half} without lora_{other_half}"
            yield Adapters.ADAPTER_HALF_PAIR.at(
                keys.pairs[alone[0]].file, alone, found=count, expected="both for every module"
            )


def _ranks(keys: AdapterKeys, config: AdapterConfig) -> Iterator[Finding]:
    wrong: dict[tuple[str, str], list[str]] = {}
    file = ""
    for module, pair in keys.pairs.items():
        if pair.a is None or pair.b is None or len(pair.a.shape) < 2 or len(pair.b.shape) < 2:
            continue
        ranks = pair.a.shape[0], pair.b.shape[1]
        if 0 in pair.a.shape or 0 in pair.b.shape:
            continue  # `headers` reports empty tensors
        rank = config.rank_of(plain_module(module))
        # A targeted parameter of experts has the pairs of all experts in one tensor.
        stacked = config.target_parameters and ranks[0] % rank == 0
        if ranks[0] != ranks[1] or (ranks[0] != rank and not stacked):
            texts = f"rank {ranks[0]} by {ranks[1]}", f"rank {rank}, as r says"
            wrong.setdefault(texts, []).append(module)
            file = pair.a.file
    for (actual, expected), modules in wrong.items():
        yield Adapters.ADAPTER_RANK.at(file, modules, found=actual, expected=expected)


def _dora(keys: AdapterKeys, config: AdapterConfig) -> Iterator[Finding]:
    able = {n: p for n, p in keys.pairs.items() if not config.target_parameters and p.a and p.b}
    having = [name for name, pair in keys.pairs.items() if pair.magnitude]
    lacking = [name for name in able if not able[name].magnitude]
    if config.dora and lacking:
        yield Adapters.ADAPTER_DORA.at(
            ADAPTER_CONFIG, lacking, found=f"use_dora, {len(lacking)} modules without magnitude",
            expected="a lora_magnitude_vector for every module",
        )  # fmt: skip
    if having and not config.dora:
        yield Adapters.ADAPTER_DORA.at(
            ADAPTER_CONFIG, having, found=f"{len(having)} magnitudes, use_dora is not set",
            expected="use_dora true",
        )  # fmt: skip


def _targets(keys: AdapterKeys, config: AdapterConfig) -> Iterator[Finding]:
    if isinstance(config.target_modules, str):
        return
    there = {end for module in keys.pairs for end in _ends(plain_module(module))}
    absent = [name for name in config.target_modules if name not in there]
    if absent and len(absent) < len(config.target_modules):
        yield Adapters.ADAPTER_TARGET_ABSENT.at(
            ADAPTER_CONFIG, absent, found="no pair of that name", expected="one for each target"
        )
    elif absent:
        yield Adapters.ADAPTER_TARGET_ABSENT.at(
            ADAPTER_CONFIG, absent, found="no pair of any target", expected="one for each target",
            severity=Severity.ERROR,
        )  # fmt: skip


def _ends(module: str) -> Iterator[str]:
    """Yield a module's name and its ends by dotted parts: `up_proj`, `mlp.up_proj`, ..."""
    parts = module.split(".")[-_DEEPEST:]
    return (".".join(parts[start:]) for start in range(len(parts)))


def _saved(keys: AdapterKeys, config: AdapterConfig) -> Iterator[Finding]:
    wanted = set(config.modules_to_save)
    if config.task_type in ("SEQ_CLS", "TOKEN_CLS"):
        wanted -= set(_HEADS)
    if any(_is_of(head, key) for head in _OTHER_FAMILIES for key in keys.whole):
        wanted -= set(_OTHER_FAMILIES)  # ms-swift names every possible head
    absent = sorted(name for name in wanted if not any(_is_of(name, key) for key in keys.whole))
    if absent:
        yield Adapters.ADAPTER_SAVED_ABSENT.at(
            ADAPTER_CONFIG, absent, found="no tensor of that name", expected="the module in full"
        )


def _is_of(module: str, key: str) -> bool:
    """Return True if a key belongs to a saved module that this name, or its end, denotes."""
    at = key.rpartition(".")[0]
    return at.endswith(module) or f".{module}." in f".{at}."


def _unexplained(keys: AdapterKeys, config: AdapterConfig) -> Iterator[Finding]:
    odd = []
    for name in islice(keys.whole, _MOST_WHOLE):
        module, _, part = name.rpartition(".")
        saved = any(_is_of(module_name, name) for module_name in config.modules_to_save)
        embedding = not set(_EMBEDDINGS).isdisjoint(module.split(".")[-_DEEPEST:])
        known = embedding or any(f".{head}." in f".{name}." for head in _OTHER_FAMILIES)
        if not (saved or known or (part == "bias" and config.bias != "none")):
            odd.append(name)
    if odd:
        yield Adapters.ADAPTER_UNEXPLAINED.at(
            keys.whole[odd[0]].file, [keys.keys[name] for name in odd],
            found=f"{len(odd)} full tensors", expected="named by modules_to_save or bias",
        )  # fmt: skip


def _tokens(keys: AdapterKeys, config: AdapterConfig) -> Iterator[Finding]:
    rows = {len(indices) for indices in config.token_indices.values()}
    if config.token_indices and not keys.tokens:
        yield Adapters.ADAPTER_TOKENS.at(
            ADAPTER_CONFIG, found="trainable_token_indices, and no rows", expected="their rows"
        )
    for name, tensor in keys.tokens.items():
        if not tensor.shape or 0 in tensor.shape or tensor.shape[0] in rows:
            continue
        counts = ", ".join(map(str, sorted(rows))) or "none"
        yield Adapters.ADAPTER_TOKENS.at(
            tensor.file,
            keys.keys[name],
            found=f"{tensor.shape[0]} rows",
            expected=f"{counts} indices",
        )


def check_gaps(keys: AdapterKeys, config: AdapterConfig) -> Iterator[Finding]:
    """Without the base: report layers that lack a LoRA pair that most layers have."""
    if config.layers_to_transform:
        return
    layers: dict[str, set[int]] = {}
    for module in keys.pairs:
        number = layer_of(module)
        if number is not None:
            layers.setdefault(pattern_of(module), set()).add(number)
    all_layers: set[int] = set().union(*layers.values()) if layers else set()
    total = max(all_layers, default=-1) + 1
    for pattern, there in layers.items():
        lacking = [number for number in range(min(there), total) if number not in there][:1000]
        if lacking and len(there) * 2 > total:  # else layers of two kinds alternate
            yield Adapters.ADAPTER_GAPS.at(
                "", [f"{pattern}: layer {number}" for number in lacking],
                found=f"{len(there)} of {total} layers", expected="a pair in every layer",
            )  # fmt: skip
