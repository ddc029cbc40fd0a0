"""Check that a model family can be trained in packed rows, from config.json. Knows no torch.

Every operation that mixes tokens has to know where a sequence ends. Attention does. A convolution
or a recurrent state continues into the next sequence, and so does an attention bias that counts
tokens of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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


class Unpackable(NamedTuple):
    """Reason why a model cannot be trained in packed rows, and a way out."""

    problem: str
    hint: str


def unpackable(config: Mapping[str, Any], attn_implementation: str) -> Unpackable | None:
    """Return the reason why this model cannot be trained in packed rows, or None if it can.

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
