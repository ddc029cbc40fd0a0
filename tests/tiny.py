"""Tiny configurations of real model classes: the sizes that every test's models start from."""

from __future__ import annotations

from typing import Any

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
"""Two layers; heads of 8, two to a key; a feed-forward width that is no power of 2."""


def tiny(name: str, **changes: Any) -> Any:
    """`transformers.<name>Config` of such sizes; keyword arguments change them or add to them."""
    import transformers

    return getattr(transformers, f"{name}Config")(**{**SIZES, **changes})
