"""Experts: every one of them, in one layout, and in the one that the family has on disk."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.audit.catalogue import experts as say
from tasks.audit.config_fields import of_text, text_config, whole
from tasks.audit.finding import Finding
from tasks.audit.source import Source
from tasks.audit.weights import Held

_ONE_EACH = re.compile(r"(?P<at>.+\.experts)\.(?P<number>\d{1,6})\.(?P<part>.+)")
_FUSED = re.compile(r"(?P<at>.+\.experts)\.(?P<part>(gate_up_proj|down_proj|gate_proj|up_proj).*)")
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_STORED_EACH = frozenset(
    {
        "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3",
        "glm4_moe", "ernie4_5_moe", "minimax", "minimax_m2", "phimoe", "jamba", "flex_olmo",
    }
)  # fmt: skip
"""Families whose published checkpoints have one tensor an expert."""
_IDENTITY = "zero_expert_num"
"""Of families some of whose experts give back what they get, and lack some tensors or all."""
_MOST = 10_000
"""Experts of a layer, and findings, that are looked at."""


@dataclass
class Layer:
    """Experts of one layer.

    Attributes:
        parts: what each expert has, by its number.
        fused: tensors that hold all experts at once, by key.
    """

    parts: dict[int, set[str]] = field(default_factory=dict)
    fused: dict[str, Held] = field(default_factory=dict)


def check(source: Source) -> Iterator[Finding]:
    """Layer by layer; one finding for each kind of fault."""
    if not source.is_model or not source.weights.is_whole:
        return
    layers = layers_of(source.tensors)
    if not layers or of_text(source.config(), _IDENTITY):
        return
    count = expert_count(source.config())
    yield from _complete(source, layers, count)
    yield from _counts(source, layers, count)
    fused = [key for layer in layers.values() for key in layer.fused]
    each = [at for at, layer in layers.items() if layer.parts]
    if fused and each:
        yield say.EXPERTS_MIXED.at(
            source.tensors[fused[0]].file, fused, found=f"fused; {len(each)} layers have one each",
            expected="one layout",
        )  # fmt: skip
    elif fused and text_config(source.config()).get("model_type") in _STORED_EACH:
        yield say.EXPERTS_FUSED.at(
            source.tensors[fused[0]].file, fused, found=f"{len(fused)} tensors of all experts",
            expected="one tensor for each expert",
        )  # fmt: skip


def expert_count(config: Mapping[str, Any]) -> int | None:
    """Routed experts of a layer, as config.json says."""
    return next((one for name in _COUNTS if (one := whole(of_text(config, name)))), None)


def layers_of(tensors: Mapping[str, Held]) -> dict[str, Layer]:
    """Experts by the module that they lie in."""
    found: dict[str, Layer] = {}
    for key, held in tensors.items():
        each = _ONE_EACH.fullmatch(key)
        fused = _FUSED.fullmatch(key)
        if each:
            layer = found.setdefault(each["at"], Layer())
            layer.parts.setdefault(int(each["number"]), set()).add(each["part"])
        elif fused and len(held.shape) == 3:
            found.setdefault(fused["at"], Layer()).fused[key] = held
    return found


def _complete(source: Source, layers: Mapping[str, Layer], count: int | None) -> Iterator[Finding]:
    lacking: list[str] = []
    for at, layer in layers.items():
        if not layer.parts:
            continue
        usual = set().union(*layer.parts.values())
        total = min(count or max(layer.parts) + 1, _MOST)
        for number in range(total):
            lacking += [
                f"{at}.{number}.{part}" for part in sorted(usual - layer.parts.get(number, set()))
            ]
        if len(lacking) > _MOST:
            break  # of a file that was made to take long
    if lacking:
        yield say.EXPERTS_INCOMPLETE.at(
            "", lacking, found=f"{len(lacking)} tensors of experts are not there",
            expected="the same of every expert",
        )  # fmt: skip
    bare = _bare_layers(source.tensors, layers)
    if bare:
        yield say.EXPERTS_INCOMPLETE.at(
            "", bare, found="routers of layers without experts", expected="experts beside a router"
        )


def _bare_layers(tensors: Mapping[str, Held], layers: Mapping[str, Layer]) -> list[str]:
    """Routers beside which there are no experts."""
    blocks = {at.removesuffix(".experts") for at in layers}
    ends = tuple({f".{block.rpartition('.')[2]}.gate.weight" for block in blocks})[:_MOST]
    return [
        key
        for key in tensors
        if key.endswith(ends) and key.removesuffix(".gate.weight") not in blocks
    ]


def _counts(source: Source, layers: Mapping[str, Layer], count: int | None) -> Iterator[Finding]:
    if count is None:
        return
    wrong = [
        at
        for at, layer in layers.items()
        if (layer.parts and max(layer.parts) >= count)
        or any(held.shape[0] not in (0, count) for held in layer.fused.values())
    ]
    if wrong:
        layer = layers[wrong[0]]
        there = max(layer.parts) + 1 if layer.parts else next(iter(layer.fused.values())).shape[0]
        yield say.EXPERTS_COUNT.at(
            "", wrong, found=f"{there} experts", expected=f"{count}, as config.json says"
        )
