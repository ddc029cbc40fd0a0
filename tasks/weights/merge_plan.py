"""The plan of a merge: one operation a base tensor, made and checked from headers alone.

    plan = plan_merge(base.tensors, adapter.tensors, adapter_config, BaseUse())

Shapes, ranks, and that every adapter tensor is used exactly once, are decided here.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.contract import TensorLike
from tasks.errors import ContractError
from tasks.weights.bits import is_float
from tasks.weights.names import LoraKey, parse_peft
from tasks.weights.plan import Op, Plan
from tasks.weights.terms import LowRank

_PLAIN: dict[str, tuple[Any, ...]] = {
    # adapter_config.json key: values under which `W + scale * B @ A` is all there is to do
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
    "megatron_config": (None,),
}
_PLAIN_INIT = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisers that leave the base weights alone."""


@dataclass(frozen=True)
class BaseUse:
    """How the base enters the merge.

    Attributes:
        quantized: keys that training held in 4 bits; empty when it did not quantise.
        quantization: as in train.json.
        dequantized: fold into the base as training saw it, not as it lies on disk.
        loaded_dtype: torch name of the dtype training loaded the base in.
    """

    quantized: frozenset[str] = frozenset()
    quantization: Mapping[str, Any] | None = None
    dequantized: bool = False
    loaded_dtype: str = "bfloat16"


def plan_merge(
    base: Mapping[str, TensorLike],
    adapter: Mapping[str, TensorLike],
    config: Mapping[str, Any],
    use: BaseUse,
) -> Plan:
    """Plan a merge: one operation a base tensor, in the base's order; inputs "base" and "adapter".

    Args:
        base: header entries of the base checkpoint.
        adapter: header entries of `adapter_model.safetensors`.
        config: adapter_config.json.
        use: how the base enters.

    Raises:
        ContractError: listing every finding: adapter features that are more than a plain LoRA,
            keys that match nothing, halves without the other half, shapes and ranks that differ.
    """
    findings = _config_findings(config)
    pairs = _pairs(adapter, findings)
    terms: dict[str, LowRank] = {}
    for module, halves in pairs.items():
        term = _term(module, halves, base, adapter, config, findings)
        if term is not None:
            terms[f"{module}.weight"] = term
    if not adapter:
        findings.append("the adapter holds no tensors")
    absent = sorted(use.quantized - set(base)) if use.dequantized else []
    findings += [f"{name}: quantised in training, absent from the base" for name in absent]
    if findings:
        raise ContractError(
            f"merge: adapter and base do not fit: {findings[0]}"
            + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""),
            details=findings[:50],
        )
    return Plan(tuple(_op(name, info, terms.get(name), use) for name, info in base.items()))


def _op(name: str, info: TensorLike, term: LowRank | None, use: BaseUse) -> Op:
    """What becomes of one base tensor."""
    quantization = None
    if name in use.quantized and use.quantization is not None and (use.dequantized or term):
        base = "dequantized" if use.dequantized else "original"
        quantization = {**use.quantization, "loaded_dtype": use.loaded_dtype, "base": base}
    return Op(
        name,
        tuple(info.shape),
        info.dtype,
        source=f"base:{name}",
        source_dtype=info.dtype,
        quantization=quantization,
        terms=(term,) if term else (),
    )


def lora_scale(alpha: float, rank: int, *, rslora: bool) -> float:
    """`alpha / rank` (https://arxiv.org/abs/2106.09685); rsLoRA: `alpha / sqrt(rank)`
    (https://arxiv.org/abs/2312.03732).
    """
    return alpha / math.sqrt(rank) if rslora else alpha / rank


def _config_findings(config: Mapping[str, Any]) -> list[str]:
    findings = [
        f"adapter_config.json: {key}={config[key]!r} is not supported by this merge"
        for key, plain in _PLAIN.items()
        if key in config and config[key] not in plain
    ]
    if config.get("init_lora_weights", True) not in _PLAIN_INIT:
        findings.append(
            f"adapter_config.json: init_lora_weights={config['init_lora_weights']!r} changes the "
            "base weights; convert the adapter to a plain LoRA with peft first"
        )
    findings += [
        f"adapter_config.json: {key}={config.get(key)!r} is not a positive number"
        for key in ("r", "lora_alpha")
        if not isinstance(config.get(key), int | float) or config[key] <= 0
    ]
    return findings


def _pairs(adapter: Mapping[str, TensorLike], findings: list[str]) -> dict[str, dict[str, LoraKey]]:
    pairs: dict[str, dict[str, LoraKey]] = {}
    for name in adapter:
        key = parse_peft(name)
        if key is None:
            findings.append(f"{name}: no LoRA weight this merge knows")
        else:
            pairs.setdefault(key.module, {})[key.half] = key
    return pairs


def _term(
    module: str,
    halves: Mapping[str, LoraKey],
    base: Mapping[str, TensorLike],
    adapter: Mapping[str, TensorLike],
    config: Mapping[str, Any],
    findings: list[str],
) -> LowRank | None:
    """The term that consumes one module's pair; None, and findings, when it does not fit."""
    if set(halves) != {"A", "B"}:
        findings.append(f"{module}: has lora_{'/'.join(sorted(halves))} only")
        return None
    key_a, key_b = halves["A"], halves["B"]
    target = base.get(key_a.base)
    if target is None:
        near = difflib.get_close_matches(key_a.base, list(base), n=1)
        findings.append(
            f"{key_a.peft}: the base has no {key_a.base}" + (f"; near: {near[0]}" if near else "")
        )
        return None
    shape_a, shape_b = tuple(adapter[key_a.peft].shape), tuple(adapter[key_b.peft].shape)
    rank, alpha = _rank_alpha(module, config)
    want_a, want_b = (rank, target.shape[-1]), (target.shape[0], rank)
    problems = []
    if len(target.shape) != 2 or not is_float(target.dtype):
        problems.append(f"{key_a.base}: {target.dtype} {list(target.shape)} is no float matrix")
    for key, have, want in ((key_a, shape_a, want_a), (key_b, shape_b, want_b)):
        if have != want:
            problems.append(f"{key.peft}: is {list(have)}, base and rank want {list(want)}")
        if not is_float(adapter[key.peft].dtype):
            problems.append(f"{key.peft}: dtype {adapter[key.peft].dtype} is no float")
    findings += problems
    if problems or rank <= 0 or alpha <= 0:
        return None
    scale = lora_scale(alpha, rank, rslora=bool(config.get("use_rslora")))
    return LowRank(f"adapter:{key_a.peft}", f"adapter:{key_b.peft}", scale)


def _rank_alpha(module: str, config: Mapping[str, Any]) -> tuple[int, float]:
    """Rank and alpha of a module, with PEFT's patterns: a suffix of dotted parts, or a regex."""

    def pick(patterns: Mapping[str, Any] | None, default: Any) -> Any:
        for pattern, value in (patterns or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default

    rank = pick(config.get("rank_pattern"), config.get("r"))
    alpha = pick(config.get("alpha_pattern"), config.get("lora_alpha"))
    return (rank if isinstance(rank, int) else 0, alpha if isinstance(alpha, int | float) else 0)
