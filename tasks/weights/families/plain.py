"""Compute model facts from config.json alone, for families that need no renaming.

Importing transformers and building a model on the meta device takes seconds; this takes
microseconds. It answers only for a causal language model of a family in its table, with all sizes
in config.json, no optional bias, and a checkpoint with exactly the expected tensors. In any other
case it returns None and the caller asks transformers, which then also reports what is wrong. The
tests compare every answer with transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.core.contract import Expected
from tasks.weights.adapters.live import EMBEDDING, LINEAR, OTHER, LiveModel
from tasks.weights.families.counts import oversized
from tasks.weights.families.places import Place
from tasks.weights.files.reader import DTYPE_NAMES

Shape = tuple[int, ...]

_ATTENTION = {
    "self_attn.q_proj.weight": "q h",
    "self_attn.k_proj.weight": "kv h",
    "self_attn.v_proj.weight": "kv h",
    "self_attn.o_proj.weight": "h q",
}
_BIASED = {
    "self_attn.q_proj.weight": "q h",
    "self_attn.q_proj.bias": "q",
    "self_attn.k_proj.weight": "kv h",
    "self_attn.k_proj.bias": "kv",
    "self_attn.v_proj.weight": "kv h",
    "self_attn.v_proj.bias": "kv",
    "self_attn.o_proj.weight": "h q",
}
_HEAD_NORMS = {"self_attn.q_norm.weight": "d", "self_attn.k_norm.weight": "d"}
_MLP = {"mlp.gate_proj.weight": "f h", "mlp.up_proj.weight": "f h", "mlp.down_proj.weight": "h f"}
_NORMS = {"input_layernorm.weight": "h", "post_attention_layernorm.weight": "h"}
_AROUND = {
    "pre_feedforward_layernorm.weight": "h",
    "post_feedforward_layernorm.weight": "h",
}
_LAYERS: Mapping[str, Mapping[str, str]] = {
    # architecture -> tensors of a layer in the model's order -> shape in symbols (see `_sizes`)
    "LlamaForCausalLM": {**_ATTENTION, **_MLP, **_NORMS},
    "MistralForCausalLM": {**_ATTENTION, **_MLP, **_NORMS},
    "GraniteForCausalLM": {**_ATTENTION, **_MLP, **_NORMS},
    "Qwen2ForCausalLM": {**_BIASED, **_MLP, **_NORMS},
    "Qwen3ForCausalLM": {**_ATTENTION, **_HEAD_NORMS, **_MLP, **_NORMS},
    "Gemma2ForCausalLM": {**_ATTENTION, **_MLP, **_NORMS, **_AROUND},
    "Gemma3ForCausalLM": {**_ATTENTION, **_HEAD_NORMS, **_MLP, **_NORMS, **_AROUND},
    "Olmo2ForCausalLM": {
        **_ATTENTION,
        "self_attn.q_norm.weight": "q",
        "self_attn.k_norm.weight": "kv",
        **_MLP,
        "post_attention_layernorm.weight": "h",
        "post_feedforward_layernorm.weight": "h",
    },
    "Phi3ForCausalLM": {
        "self_attn.o_proj.weight": "h q",
        "self_attn.qkv_proj.weight": "qkv h",
        "mlp.gate_up_proj.weight": "2f h",
        "mlp.down_proj.weight": "h f",
        **_NORMS,
    },
}
_OWN_HEAD_SIZE = ("Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM")
"""Architectures with a default `head_dim` of their own: config.json has to state it."""
_FORBIDDEN = ("attention_bias", "mlp_bias", "quantization_config", "auto_map")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def plain_facts(
    config: Mapping[str, Any], dtype: str, disk: Mapping[str, Shape] | None
) -> dict[str, Any] | None:
    """Return the fields of `contracts.ModelFacts`; None if transformers has to be asked.

    Args:
        config: content of config.json.
        dtype: torch name of the dtype of the parameters.
        disk: shape of every tensor of the checkpoint, by key; None for no checkpoint.
    """
    shapes = _shapes(config)
    if shapes is None:
        return None
    tied: bool = config["tie_word_embeddings"]
    stored = {name: shape for name, shape in shapes.items() if not (tied and name == _HEAD)}
    if disk is not None:
        if {**shapes, **disk} != shapes or not set(stored) <= set(disk):
            return None
        stored = dict(disk)
    short = DTYPE_NAMES.get(dtype)
    ties = {_HEAD: _EMBEDDING} if tied else {}
    return {
        "tensors": tuple(Expected(n, s, short) for n, s in stored.items() if n not in ties),
        "tied": ties,
        "embedding": _EMBEDDING,
        "quantized": tuple(n for n in stored if n.endswith("_proj.weight")),
        "live": _live(shapes, ties),
        "places": tuple(Place(n, s, n, s) for n, s in stored.items()),
        "aliases": {alias: alias for alias in ties},
    }


def _shapes(config: Mapping[str, Any]) -> dict[str, Shape] | None:
    """Return the shapes of all tensors in memory, in the model's order; None if not known."""
    architectures = config.get("architectures") or [""]
    layer = _LAYERS.get(architectures[0])
    sizes = _sizes(config, architectures[0])
    plain = not any(config.get(name) for name in _FORBIDDEN)
    if layer is None or sizes is None or not plain:
        return None
    if not isinstance(config.get("tie_word_embeddings"), bool):
        return None
    hidden = sizes["h"]
    shapes: dict[str, Shape] = {_EMBEDDING: (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        for name, symbols in layer.items():
            shape = tuple(sizes[symbol] for symbol in symbols.split())
            shapes[f"model.layers.{index}.{name}"] = shape
    return {**shapes, "model.norm.weight": (hidden,), _HEAD: (config["vocab_size"], hidden)}


def _sizes(config: Mapping[str, Any], architecture: str) -> dict[str, int] | None:
    """Return the sizes that the symbols of `_LAYERS` stand for; None if not known."""
    names = (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "num_hidden_layers",
        "vocab_size",
    )
    values = [config.get(name) for name in names]
    if oversized(config):
        return None
    if not all(type(value) is int and value > 0 for value in values):
        return None
    hidden, inner, heads, key_heads = (config[name] for name in names[:4])
    size = config.get("head_dim")
    if size is None and architecture not in _OWN_HEAD_SIZE and hidden % heads == 0:
        size = hidden // heads
    if type(size) is not int:
        return None
    queries, keys = heads * size, key_heads * size
    return {
        "h": hidden,
        "f": inner,
        "2f": 2 * inner,
        "d": size,
        "q": queries,
        "kv": keys,
        "qkv": queries + 2 * keys,
    }


def _live(shapes: Mapping[str, Shape], ties: Mapping[str, str]) -> LiveModel:
    return LiveModel(
        tensors={name: Expected(name, shape) for name, shape in shapes.items()},
        modules=dict(_modules(shapes)),
        tied=ties,
        input_embedding=_EMBEDDING.removesuffix(".weight"),
        output_embedding=_HEAD.removesuffix(".weight"),
    )


def _modules(shapes: Mapping[str, Shape]) -> Iterator[tuple[str, str]]:
    """Yield (name, kind) of every module with a tensor, parents before children.

    Modules without tensors, such as activations, are left out: they cannot be trained.
    """
    for name, shape in shapes.items():
        parts = name.split(".")[:-1]
        for depth in range(1, len(parts)):
            yield ".".join(parts[:depth]), OTHER
        module = ".".join(parts)
        matrix = EMBEDDING if name == _EMBEDDING else LINEAR
        if name.endswith(".weight"):
            yield module, matrix if len(shape) == 2 else OTHER
