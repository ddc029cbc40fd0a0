"""Dimensions of a decoder, from its `config.json`. Knows no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tasks.drift.fingerprint import EXPERTS

MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")
"""Families of experts whose dimensions are read here."""
ADAPTED = ("mixtral", "qwen3_moe", "olmoe")
"""Families whose experts and routers peft 0.21 adapts for `all-linear`, in place of the maps of
dense feed-forward blocks (`_convert_peft_config_moe`)."""

_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a decoder. `tied`: the output head is the input embedding.

    In a mixture of experts `sparse_layers` of the layers have `experts` feed-forward blocks of
    width `expert_width`, of which a token passes through `top_k`, and a shared one of width
    `shared_width` (0: none). transformers stores the experts of a layer in one tensor, so that they
    are no linear maps: QLoRA leaves them in 16 bits. `adapted`: LoRA on all maps trains them, too.

    `recurrent` of the layers have linear attention with `recurrent_maps` (Qwen3.5) and no keys and
    values to cache. `gated`: queries come with a gate of their width. `per_layer`: weights of
    embeddings that each layer has of its own (Gemma 4). Towers for images and sound do not count.
    """

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    sparse_layers: int = 0
    experts: int = 0
    expert_width: int = 0
    shared_width: int = 0
    top_k: int = 0
    adapted: bool = False
    recurrent: int = 0
    recurrent_maps: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    gated: bool = False
    per_layer: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """Read them from the contents of `config.json`.

        Raises:
            KeyError: a family that names its dimensions differently, or a mixture of experts that
                is not in `MIXTURES`.
        """
        text = config.get("text_config") or config
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
            per_layer=_per_layer(text),
            **(_mixture(text) if experts_of(text) > 1 else {}),
            **(_recurrent(text) if text.get("model_type") == "qwen3_5_text" else {}),
        )

    @property
    def query(self) -> int:
        """Total width of all query heads."""
        return self.heads * self.head_dim

    @property
    def inner(self) -> int:
        """Width of all feed-forward blocks that a token passes through, of the widest layer."""
        routed = self.top_k * self.expert_width + self.shared_width
        return max(routed, self.intermediate if self.sparse_layers < self.layers else 0)

    def linears(self, *, sparse: bool = False) -> dict[str, tuple[int, int]]:
        """Return (in, out) of every linear map of one layer, by module name.

        Args:
            sparse: True for a layer with experts, whose maps are those of the shared expert.
        """
        q, kv = self.query, self.kv_heads * self.head_dim
        maps = {
            "q_proj": (self.hidden, 2 * q if self.gated else q),
            "k_proj": (self.hidden, kv),
            "v_proj": (self.hidden, kv),
            "o_proj": (q, self.hidden),
        }
        width = self.shared_width if sparse else self.intermediate
        if width:
            maps |= {
                "gate_proj": (self.hidden, width),
                "up_proj": (self.hidden, width),
                "down_proj": (width, self.hidden),
            }
        if sparse and width:
            maps["shared_expert_gate"] = (self.hidden, 1)
        return maps

    def layouts(self) -> Iterator[tuple[int, dict[str, tuple[int, int]]]]:
        """Yield the kinds of layers: how many there are, and their linear maps."""
        if dense := self.layers - self.sparse_layers - self.recurrent:
            yield dense, self.linears()
        if self.recurrent:
            maps = self.linears()
            yield self.recurrent, {**self.recurrent_maps, **{name: maps[name] for name in _MLP}}
        if self.sparse_layers:
            yield self.sparse_layers, self.linears(sparse=True)

    def linear_weights(self) -> int:
        """Return the number of weights in the linear maps of all layers."""
        return sum(n * sum(i * o for i, o in maps.values()) for n, maps in self.layouts())

    def expert_weights(self, *, active: bool = False) -> int:
        """Return the number of weights in experts and routers, `active` for one token's alone."""
        used = self.top_k if active else self.experts
        return self.sparse_layers * self.hidden * (3 * used * self.expert_width + self.experts)

    def other_weights(self) -> int:
        """Return the number of weights in embeddings, an untied output head, norms and experts."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        norms = self.hidden * (2 * self.layers + 1)
        return tables + norms + self.per_layer + self.expert_weights()

    def weights(self) -> int:
        """Return the number of weights of a causal model, without biases."""
        return self.linear_weights() + self.other_weights()

    def kv_cache(self, tokens: int, item: int = 2) -> int:
        """Return the bytes of keys and values of `tokens` tokens, at `item` bytes per number."""
        layers = self.layers - self.recurrent
        return 2 * layers * self.kv_heads * self.head_dim * tokens * item


def experts_of(text: Mapping[str, Any]) -> int:
    """Return the number of experts in a layer, from a decoder's `config.json`; 0 without any."""
    nested = text.get("ffn_config") or {}  # of DBRX
    return max(of.get(name) or 0 for of in (text, nested) for name in EXPERTS)


def _mixture(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Sizes` that a mixture of experts has.

    Which layers have experts: `Qwen2MoeDecoderLayer` of transformers 5.19.
    """
    family = text.get("model_type")
    if family not in MIXTURES:
        raise KeyError(f"dimensions as read here: {family} is another mixture of experts")
    step, dense = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or ()
    layers = range(text["num_hidden_layers"])
    sparse = sum(layer not in dense and (layer + 1) % step == 0 for layer in layers)
    return {
        "sparse_layers": sparse,
        "experts": experts_of(text),
        "expert_width": text.get("moe_intermediate_size") or text["intermediate_size"],
        "shared_width": text.get("shared_expert_intermediate_size") or 0,
        "top_k": text["num_experts_per_tok"],
        "adapted": family in ADAPTED,
    }


def _per_layer(text: Mapping[str, Any]) -> int:
    """Return the weights of embeddings that each layer has of its own, and of their maps."""
    width, layers = text.get("hidden_size_per_layer_input") or 0, text["num_hidden_layers"]
    rows = text.get("vocab_size_per_layer_input") or 0
    return layers * width * (rows + 3 * text["hidden_size"])


def _recurrent(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Sizes` that gated linear attention has (`Qwen3_5GatedDeltaNet`)."""
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    values = heads * text["linear_value_head_dim"]
    return {
        "recurrent": (text.get("layer_types") or ()).count("linear_attention"),
        "recurrent_maps": {
            "in_proj_qkv": (hidden, 2 * keys + values),
            "in_proj_z": (hidden, values),
            "in_proj_b": (hidden, heads),
            "in_proj_a": (hidden, heads),
            "out_proj": (values, hidden),
        },
        "gated": True,
    }
