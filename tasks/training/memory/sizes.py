"""Dimensions of a decoder, from its `config.json`. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Where config.json says how many experts there are."""


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a decoder. D hidden, F intermediate, L layers, V vocabulary."""

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """From the contents of `config.json`.

        Raises:
            KeyError: a family with other names, or one whose layers hold several feed-forward
                blocks: counted as one they would be a fraction of what there is.
        """
        text = config.get("text_config") or config
        if any((text.get(name) or 0) > 1 for name in EXPERTS):
            raise KeyError("single feed-forward block a layer: it is a mixture of experts")
        heads = text["num_attention_heads"]
        return cls(
            hidden=text["hidden_size"],
            intermediate=text["intermediate_size"],
            layers=text["num_hidden_layers"],
            vocab=text["vocab_size"],
            heads=heads,
            kv_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        )

    @property
    def query(self) -> int:
        """Width of all query heads together."""
        return self.heads * self.head_dim

    def linears(self) -> dict[str, tuple[int, int]]:
        """(in, out) of every linear map of one layer."""
        q, kv = self.query, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def linear_weights(self) -> int:
        """Weights in all layers' linear maps."""
        return self.layers * sum(i * o for i, o in self.linears().values())

    def other_weights(self) -> int:
        """Embeddings, output head where it is not tied, norms."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return tables + self.hidden * (2 * self.layers + 1)

    def weights(self) -> int:
        """All weights of a causal model, biases left out."""
        return self.linear_weights() + self.other_weights()

    def kv_cache(self, tokens: int, item: int = 2) -> int:
        """Bytes of keys and values of so many tokens, of `item` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * item
