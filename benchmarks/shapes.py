"""Shapes of Qwen2.5 models at several sizes, and of a rank-64 adapter on every linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RANK = 64
ALPHA = 128


@dataclass(frozen=True)
class Size:
    """Dimensions of a model; those of Qwen2.5 in `SIZES`."""

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int = 151_936

    @property
    def kv(self) -> int:
        """Width of keys and values."""
        return self.hidden // self.heads * self.kv_heads


SIZES = {
    "0.5": Size("0.5", 896, 4864, 24, 14, 2),
    "1.5": Size("1.5", 1536, 8960, 28, 12, 2),
    "3": Size("3", 2048, 11008, 36, 16, 2),
    "tiny": Size("tiny", 64, 128, 2, 4, 2, 300),
}


def linears(size: Size) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every linear layer by module name, without the head."""
    h, i, kv = size.hidden, size.inner, size.kv
    kinds = {
        "self_attn.q_proj": (h, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h),
        "self_attn.o_proj": (h, h), "mlp.gate_proj": (i, h), "mlp.up_proj": (i, h),
        "mlp.down_proj": (h, i),
    }  # fmt: skip
    return {
        f"model.layers.{layer}.{kind}": shape
        for layer in range(size.layers)
        for kind, shape in kinds.items()
    }


def model_shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model; the head is tied to the embedding."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocabulary, size.hidden)
    }
    for module, shape in linears(size).items():
        shapes[f"{module}.weight"] = shape
        if module.endswith(("q_proj", "k_proj", "v_proj")):
            shapes[f"{module}.bias"] = shape[:1]
    for layer in range(size.layers):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (size.hidden,)
    shapes["model.norm.weight"] = (size.hidden,)
    return shapes


def adapter_shapes(size: Size) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of an adapter."""
    shapes: dict[str, tuple[int, ...]] = {}
    for module, (rows, columns) in linears(size).items():
        shapes[f"base_model.model.{module}.lora_A.weight"] = (RANK, columns)
        shapes[f"base_model.model.{module}.lora_B.weight"] = (rows, RANK)
    return shapes


def model_config(size: Size) -> dict[str, Any]:
    """Return the config.json of a model."""
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "dtype": "bfloat16",
        "hidden_size": size.hidden, "intermediate_size": size.inner, "tie_word_embeddings": True,
        "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "vocab_size": size.vocabulary,
        "max_position_embeddings": 4096,
    }  # fmt: skip


def adapter_config(size: Size) -> dict[str, Any]:
    """Return the adapter_config.json of an adapter."""
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA,
        "target_modules": sorted({name.rpartition(".")[2] for name in linears(size)}),
        "bias": "none", "inference_mode": True, "lora_dropout": 0.0, "init_lora_weights": True,
        "base_model_name_or_path": "synthetic", "use_rslora": False, "fan_in_fan_out": False,
    }  # fmt: skip


HUGE = Size("huge", 12_288, 45_568, 99, 96, 8)
"""About 400 GB in bf16: 100 files of about 4 GB, one for the embedding and one for each layer."""
