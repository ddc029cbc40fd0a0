"""The toy base's dimensions, as in its config.json; readable without torch, before it exists."""

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
"""Arguments of `Qwen2Config`. About 918,000 parameters."""
