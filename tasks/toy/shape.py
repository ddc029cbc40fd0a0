"""Dimensions of the toy base, as in its config.json. Importing this needs no torch."""

from __future__ import annotations

from typing import Any

VOCABULARY = 512
CONTEXT = 512
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
"""Arguments of `Qwen2Config`, about 918,000 parameters."""
