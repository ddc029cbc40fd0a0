"""Families of models, told apart by config.json: packed or padded rows, experts, attention cap.

Every operation that mixes tokens has to know where a sequence ends. Attention does. A convolution
or a recurrent state continues into the next sequence, chunks and indexes of attention are counted
along the row, and so is an attention bias. Such models get padded batches: what is causal does not
see the padding behind a sequence. Knows no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tasks.drift.fingerprint import EXPERTS

ATTENTION = frozenset({"full_attention", "sliding_attention", "attention"})
"""Layer types that packing supports (`layer_types` of config.json)."""
STATEFUL = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
        "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5",
        "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    }
)  # fmt: skip
"""Families with recurrent or convolutional layers; some of them list no layer types."""
ALIBI = frozenset({"bloom", "mpt"})
"""Families whose attention bias counts distances along the row."""
INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Families whose attention reads the tokens that an indexer selects."""
CAPPED = "model.attn_implementation=eager, or flash_attention_2 on a GPU"
"""Settings whose attention keeps a cap of its logits."""
ROUTED = ("sft", "dpo", "orpo", "simpo")
"""Objectives that the router loss can be added to."""
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "moe_loss_weight")
"""Names of the weight of the router loss in config.json."""


def why_padded(config: Mapping[str, Any], attn_implementation: str) -> str:
    """Return the reason why sequences of this model are padded instead of packed; "" if packed."""
    text = {**config, **(config.get("text_config") or {})}
    family = str(text.get("model_type", "this family"))
    foreign = sorted(set(text.get("layer_types") or ()) - ATTENTION)
    if foreign:
        return f"{family} has layers of type {', '.join(foreign)}"
    if family in STATEFUL:
        return f"{family} has recurrent layers"
    if family in INDEXED:
        return f"{family} chooses tokens by an index of the row"
    if family in ALIBI or text.get("alibi"):
        return f"{family} biases attention by distances along the row (ALiBi)"
    if attn_implementation == "eager":
        return f"{family} is computed with eager attention"
    return ""


def uncapped(config: Mapping[str, Any], attn_implementation: str) -> float | None:
    """Return the cap on attention logits that this attention would leave out; None if none is."""
    text = {**config, **(config.get("text_config") or {})}
    cap = text.get("attn_logit_softcapping")
    return float(cap) if cap and attn_implementation == "sdpa" else None


def experts_of(text: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer, from a decoder's `config.json`; 0 without any."""
    nested = text.get("ffn_config") or {}  # of DBRX
    return max(of.get(name) or 0 for of in (text, nested) for name in EXPERTS)


def router_coefficient(config: Mapping[str, Any], wanted: float | None) -> float:
    """Return the weight of the router loss; 0 for a model without experts.

    `wanted` is `train.router_aux_loss_coef`; None takes the weight in config.json.
    """
    text = config.get("text_config") or config
    if experts_of(text) <= 1:
        return 0.0
    if wanted is not None:
        return wanted
    nested = text.get("ffn_config") or {}  # of DBRX
    own = (of.get(name) for of in (text, nested) for name in _COEFFICIENTS)
    return float(next((value for value in own if value), 0.0))
