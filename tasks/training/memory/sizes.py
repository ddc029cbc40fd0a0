"""Dimensions of a decoder, from its `config.json`. Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Keys of config.json that give the number of experts."""


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a decoder. `tied`: the output head is the input embedding."""

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
        """Read them from the contents of `config.json`.

        Raises:
            KeyError: a family that names its dimensions differently, or a mixture of experts.
        """
        text = config.get("text_config") or config
        if any((text.get(name) or 0) > 1 for name in EXPERTS):
            raise KeyError("single feed-forward block per layer: it is a mixture of experts")
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
        """Total width of all query heads."""
        return self.heads * self.head_dim

    def linears(self) -> dict[str, tuple[int, int]]:
        """Return (in, out) of every linear map of one layer, by module name."""
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
        """Return the number of weights in the linear maps of all layers."""
        return self.layers * sum(i * o for i, o in self.linears().values())

    def other_weights(self) -> int:
        """Return the number of weights in embeddings, an untied output head and norms."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return tables + self.hidden * (2 * self.layers + 1)

    def weights(self) -> int:
        """Return the number of weights of a causal model, without biases."""
        return self.linear_weights() + self.other_weights()

    def kv_cache(self, tokens: int, item: int = 2) -> int:
        """Return the bytes of keys and values of `tokens` tokens, at `item` bytes per number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * tokens * item
