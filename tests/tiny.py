"""The one factory of tiny models and tokenizers: real classes, random weights of a seed."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
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
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")


def tiny(name: str, **changes: Any) -> Any:
    """`transformers.<name>Config` of such sizes; keyword arguments change them or add to them."""
    import transformers

    return getattr(transformers, f"{name}Config")(**{**SIZES, **changes})


def random_model(config: Any, *, seed: int = 0, dtype: str = "bfloat16") -> Any:
    """Return the model of a configuration with random weights.

    They are larger than a class makes them: of its models any rounding changes the top token.
    """
    import torch

    from tasks.weights.model_class import auto_class

    torch.manual_seed(seed)
    model = auto_class(config).from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 0.5 if "embed" in name or "lm_head" in name else 0.08
            parameter.add_(torch.randn(parameter.shape).to(parameter) * size)
    return model.eval()


def make_tokenizer(first: Sequence[str] = (), end: str = "<|im_end|>", pad: str = "<|endoftext|>"):
    """Return a tokenizer of 256 bytes without merges, with chat markup; `first` has ids from 0."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*first, *alphabet])}
    core = Tokenizer(models.BPE(vocabulary, []))
    core.normalizer = normalizers.NFC()  # which transformers adds to every Qwen2
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(first))
    more = {} if first else {"additional_special_tokens": ["<|im_start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=end, pad_token=pad, **more)
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer whose special tokens come first and whose EOS is not the end of a turn."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(SPECIAL, "<|endoftext|>", "<|pad|>").save_pretrained(folder)
    path = folder / "tokenizer_config.json"  # a class that every version of transformers has
    settings = {**json.loads(path.read_text()), "tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(settings, indent=2))


def save_model(folder: Path, config: Any, **options: Any) -> Path:
    """Save a model of `random_model` with a tokenizer."""
    random_model(config, **options).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_base(
    folder: Path,
    tokenizer: Any,
    kind: str = "Qwen2",
    *,
    device: str = "cpu",
    shard: str = "5GB",
    **changes: Any,
) -> Path:
    """Save a model to train, in bf16 and as its class initialises it, with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    usual = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "vocab_size": len(tokenizer),
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(tiny(kind, **(usual | changes)))
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=shard)
    tokenizer.save_pretrained(folder)
    return folder


FAMILY_SIZES = {
    **SIZES,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
FUSED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


@dataclass(frozen=True)
class Family:
    """A family of models, with target_parameters of its fused experts and target_modules."""

    config: Callable[..., Any]
    experts: tuple[str, ...] = ()
    targets: Any = "all-linear"


def _config(name: str, **own: Any) -> Callable[..., Any]:
    def make(**changes: Any) -> Any:
        import transformers

        return getattr(transformers, name)(**{**FAMILY_SIZES, **own, **changes})

    return make


def _gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2Config(**{**FAMILY_SIZES, **sizes, **changes})


def _falcon(**changes: Any) -> Any:
    from transformers import FalconConfig

    kept = {
        k: v
        for k, v in FAMILY_SIZES.items()
        if k not in ("intermediate_size", "num_key_value_heads")
    }
    return FalconConfig(**{**kept, "alibi": False, **changes})


def _gemma3(**changes: Any) -> Any:
    from transformers import Gemma3Config

    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = {**FAMILY_SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
    own = {"mm_tokens_per_image": 4, "image_token_index": 95}
    return Gemma3Config(text_config={**text, **changes}, vision_config=vision, **own, **changes)


def _qwen2_5_vl(**changes: Any) -> Any:
    from transformers import Qwen2_5_VLConfig

    width = changes.get("hidden_size", FAMILY_SIZES["hidden_size"])
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
        "out_hidden_size": width, "patch_size": 14, "fullatt_block_indexes": [0],
    }  # fmt: skip
    pairs = width // FAMILY_SIZES["num_attention_heads"] // 2
    time, height = pairs // 4, (pairs - pairs // 4) // 2
    section = [time, height, pairs - time - height]
    rope = {"rope_type": "default", "mrope_section": section, "rope_theta": 10000.0}
    ids = {"image_token_id": 93, "video_token_id": 94, "vision_start_token_id": 92}
    text = {**FAMILY_SIZES, "rope_parameters": rope, **changes}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids, **changes)


_MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
DEEPSEEK = {
    "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 12,
    "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
FAMILIES: dict[str, Family] = {
    "llama": Family(_config("LlamaConfig")),
    "mistral": Family(_config("MistralConfig", head_dim=8)),
    "qwen2": Family(_config("Qwen2Config")),
    "qwen3": Family(_config("Qwen3Config", head_dim=8)),
    "gemma2": Family(_config("Gemma2Config", **_GEMMA)),
    "gemma3_text": Family(_config("Gemma3TextConfig", **_GEMMA)),
    "gemma3": Family(_gemma3),
    "phi3": Family(_config("Phi3Config")),
    "olmo2": Family(_config("Olmo2Config")),
    "granite": Family(_config("GraniteConfig")),
    "gpt2": Family(_gpt2),
    "gpt_neox": Family(_config("GPTNeoXConfig", num_key_value_heads=4)),
    "falcon": Family(_falcon),
    "mixtral": Family(_config("MixtralConfig", num_local_experts=4), FUSED),
    "qwen2_moe": Family(
        _config("Qwen2MoeConfig", **_MOE, shared_expert_intermediate_size=24), FUSED
    ),
    "qwen3_moe": Family(_config("Qwen3MoeConfig", **_MOE, head_dim=8), FUSED),
    "deepseek_v3": Family(_config("DeepseekV3Config", **DEEPSEEK), FUSED),
    "qwen2_5_vl": Family(_qwen2_5_vl),
}
