"""Check that all experts exist, in one layout, and in the layout that the family stores."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.audit.catalogue.model import Experts
from tasks.audit.config_fields import of_text, text_config, whole
from tasks.audit.finding import Finding
from tasks.audit.source import Source
from tasks.audit.weights import StoredTensor

_ONE_EACH = re.compile(r"(?P<at>.+\.experts)\.(?P<number>\d{1,6})\.(?P<part>.+)")
_FUSED = re.compile(r"(?P<at>.+\.experts)\.(?P<part>(gate_up_proj|down_proj|gate_proj|up_proj).*)")
_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_STORED_EACH = frozenset(
    {
        "mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "deepseek_v2", "deepseek_v3",
        "glm4_moe", "ernie4_5_moe", "minimax", "minimax_m2", "phimoe", "jamba", "flex_olmo",
    }
)  # fmt: skip
"""Families whose published checkpoints have one tensor per expert."""
_IDENTITY = "zero_expert_num"
"""Setting of families with identity experts, which lack some or all tensors."""
_MOST = 10_000
"""Most experts of a layer, and most missing tensors, to examine."""


@dataclass
class Layer:
    """Experts of one layer.

    Attributes:
        parts: names of the tensors of each expert, by its number.
        fused: tensors that hold all experts at once, by key.
    """

    parts: dict[int, set[str]] = field(default_factory=dict)
    fused: dict[str, StoredTensor] = field(default_factory=dict)


def check(source: Source) -> Iterator[Finding]:
    """Check layer by layer; each kind of fault gives one finding."""
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
        yield from Experts.EXPERTS_MIXED.of(
            source, fused, found=f"fused; {len(each)} layers have one each", expected="one layout"
        )
    elif fused and text_config(source.config()).get("model_type") in _STORED_EACH:
        yield from Experts.EXPERTS_FUSED.of(
            source, fused, found=f"{len(fused)} tensors of all experts",
            expected="one tensor for each expert",
        )  # fmt: skip


def expert_count(config: Mapping[str, Any]) -> int | None:
    """Return the number of routed experts per layer in config.json."""
    return next((count for name in _COUNTS if (count := whole(of_text(config, name)))), None)


def layers_of(tensors: Mapping[str, StoredTensor]) -> dict[str, Layer]:
    """Return the experts of each layer, by the name of their module."""
    layers: dict[str, Layer] = {}
    for key, tensor in tensors.items():
        each = _ONE_EACH.fullmatch(key)
        fused = _FUSED.fullmatch(key)
        if each:
            layer = layers.setdefault(each["at"], Layer())
            layer.parts.setdefault(int(each["number"]), set()).add(each["part"])
        elif fused and len(tensor.shape) == 3:
            layers.setdefault(fused["at"], Layer()).fused[key] = tensor
    return layers


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
            break  # the file may be malicious
    if lacking:
        yield Experts.EXPERTS_INCOMPLETE.at(
            "", lacking, found=f"{len(lacking)} tensors of experts are missing",
            expected="the same tensors for every expert",
        )  # fmt: skip
    bare = _bare_layers(source.tensors, layers)
    if bare:
        yield Experts.EXPERTS_INCOMPLETE.at(
            "", bare, found="routers of layers without experts", expected="experts beside a router"
        )


def _bare_layers(tensors: Mapping[str, StoredTensor], layers: Mapping[str, Layer]) -> list[str]:
    """Return routers of layers without experts."""
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
        or any(tensor.shape[0] not in (0, count) for tensor in layer.fused.values())
    ]
    if wrong:
        layer = layers[wrong[0]]
        actual = max(layer.parts) + 1 if layer.parts else next(iter(layer.fused.values())).shape[0]
        yield Experts.EXPERTS_COUNT.at(
            "", wrong, found=f"{actual} experts", expected=f"{count}, as config.json says"
        )
