"""Which families can be trained in packed rows, from their config.json alone. Knows no torch.

Everything that mixes tokens has to be told where a sequence ends. Attention is told; a convolution
or a recurrent state runs on into the neighbour, and so does a bias that counts tokens of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

ATTENTION = frozenset({"full_attention", "sliding_attention", "attention"})
"""Layer types that packing knows (`layer_types` of config.json)."""
STATEFUL = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
        "lfm2_moe", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid", "qwen3_5",
        "qwen3_5_moe", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    }
)  # fmt: skip
"""Families with recurrent or convolutional layers, some of which name no layer types."""
ALIBI = frozenset({"bloom", "mpt"})
"""Families whose attention is biased by distances that are counted along the row."""


class Unpackable(NamedTuple):
    """Why a model cannot be trained in packed rows, and what can be done."""

    problem: str
    hint: str


def unpackable(config: Mapping[str, Any], attn_implementation: str) -> Unpackable | None:
    """Why this model cannot be trained in packed rows; None when nothing speaks against it.

    Args:
        config: contents of config.json.
        attn_implementation: `model.attn_implementation`.
    """
    text = {**config, **(config.get("text_config") or {})}
    family = str(text.get("model_type", "this family"))
    foreign = sorted(set(text.get("layer_types") or ()) - ATTENTION)
    if family in STATEFUL or foreign:
        what = f"layers of type {', '.join(foreign)}" if foreign else "recurrent layers"
        return Unpackable(
            f"{family} has {what}, which carry a sequence's state on into its neighbour",
            "models whose layers are full or sliding-window attention can be trained",
        )
    if family in ALIBI or text.get("alibi"):
        return Unpackable(
            f"{family} biases attention by distances counted along the whole row (ALiBi)",
            "models with rotary or learned positions can be trained",
        )
    cap = text.get("attn_logit_softcapping")
    if cap and attn_implementation == "sdpa":
        return Unpackable(
            f"{family} caps its attention logits at {cap}, which sdpa leaves out",
            "model.attn_implementation=eager, or flash_attention_2 on a GPU",
        )
    return None
