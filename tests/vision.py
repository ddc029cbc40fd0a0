"""Tiny untrained vision-language models of today's families, in the layout of their releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.tiny import SIZES

TOKENS = ("<boi>", "<eoi>", "<img>", "<vid>", "<vs>", "<ve>")
"""Tokens of images, for the configurations."""
PROCESSOR = "preprocessor_config.json"
_TEXT = {**SIZES, "max_position_embeddings": 512, "hidden_size": 64, "head_dim": 32}
_VISION = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
_PATCHES = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
_MOE = {"num_experts": 4, "moe_intermediate_size": 32}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
}  # fmt: skip
_WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
_RELEASED = {
    "gemma3": (
        ("model.language_model.", "language_model.model."),
        ("vision_tower.", "vision_tower.vision_model."),
    ),
}
"""Prefixes that transformers 5.19 saves, and those of the release, which vLLM reads."""


def _rope(*section: int) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(section)}
    return {"rope_parameters": {**rope, "mrope_interleaved": True}}


def _gemma3(text: dict[str, Any], ids: dict[str, int]) -> Any:
    from transformers import Gemma3Config

    own = {"query_pre_attn_scalar": 32, "num_hidden_layers": 4, **_WINDOWS}
    return Gemma3Config(
        text_config={**text, **own}, vision_config={**_VISION, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=ids["<img>"], boi_token_index=ids["<boi>"],
        eoi_token_index=ids["<eoi>"],
    )  # fmt: skip


def _gemma4(text: dict[str, Any], ids: dict[str, int], **own: Any) -> Any:
    from transformers import Gemma4Config

    width = {"num_hidden_layers": 4, "global_head_dim": 64, "final_logit_softcapping": 30.0}
    layers = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": text["vocab_size"]}
    return Gemma4Config(
        text_config={**text, **width, **layers, **_WINDOWS, **own}, audio_config=None,
        vision_config={
            **_VISION, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64,
            "default_output_length": 280,
        },
        image_token_id=ids["<img>"], video_token_id=ids["<vid>"], boi_token_id=ids["<boi>"],
        eoi_token_id=ids["<eoi>"],
    )  # fmt: skip


def _gemma4_moe(text: dict[str, Any], ids: dict[str, int]) -> Any:
    own = {"enable_moe_block": True, "top_k_experts": 2, **_MOE, "hidden_size_per_layer_input": 0}
    return _gemma4(text, ids, **own)


def _qwen(name: str, text: dict[str, Any], ids: dict[str, int], **vision: Any) -> Any:
    import transformers

    sizes = {**_PATCHES, "out_hidden_size": 64, "patch_size": 14, **vision}
    return getattr(transformers, name)(
        text_config=text, vision_config=sizes,
        image_token_id=ids["<img>"], video_token_id=ids["<vid>"], vision_start_token_id=ids["<vs>"],
        vision_end_token_id=ids["<ve>"], tie_word_embeddings=False,
    )  # fmt: skip


def _qwen3_5(text: dict[str, Any], ids: dict[str, int]) -> Any:
    text = {**text, **_LINEAR, **_rope(4, 2, 2)}
    text["rope_parameters"]["partial_rotary_factor"] = 0.5
    return _qwen("Qwen3_5Config", text, ids, num_position_embeddings=16)


def _qwen3_5_moe(text: dict[str, Any], ids: dict[str, int]) -> Any:
    own = {**_MOE, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32}
    text = {**text, **_LINEAR, **_rope(4, 2, 2), **own}
    text["rope_parameters"]["partial_rotary_factor"] = 0.5
    return _qwen("Qwen3_5MoeConfig", text, ids, num_position_embeddings=16)


def _qwen3_vl(text: dict[str, Any], ids: dict[str, int]) -> Any:
    own = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    return _qwen("Qwen3VLConfig", {**text, **_rope(8, 4, 4)}, ids, **own)


def _mistral3(text: dict[str, Any], ids: dict[str, int]) -> Any:
    from transformers import Mistral3Config, MistralConfig, PixtralVisionConfig

    vision = PixtralVisionConfig(**_VISION, head_dim=16, image_size=28, patch_size=14)
    return Mistral3Config(
        text_config=MistralConfig(**text), vision_config=vision, image_token_index=ids["<img>"],
        tie_word_embeddings=False,
    )  # fmt: skip


def _llama4(text: dict[str, Any], ids: dict[str, int]) -> Any:
    from transformers import Llama4Config

    own = {
        "intermediate_size_mlp": 96, "num_local_experts": 2, "num_experts_per_tok": 1,
        "attention_chunk_size": 32, "no_rope_layers": [1, 0], "router_aux_loss_coef": 0.0,
    }  # fmt: skip
    sizes = {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32}
    vision = {**_VISION, **sizes, "image_size": 28, "patch_size": 14, "pixel_shuffle_ratio": 0.5}
    return Llama4Config(
        text_config={**text, **own}, vision_config=vision, image_token_index=ids["<img>"],
        boi_token_index=ids["<boi>"], eoi_token_index=ids["<eoi>"],
    )  # fmt: skip


FAMILIES = {
    "gemma3": _gemma3, "gemma4": _gemma4, "gemma4_moe": _gemma4_moe, "llama4": _llama4,
    "mistral3": _mistral3, "qwen3_5": _qwen3_5, "qwen3_5_moe": _qwen3_5_moe, "qwen3_vl": _qwen3_vl,
}  # fmt: skip


def make_config(
    family: str, vocabulary: int = 96, ids: dict[str, int] | None = None, **ends: Any
) -> Any:
    """Return the configuration of a family; `ends`: ids of EOS and padding."""
    ids = ids or {token: vocabulary - 1 - i for i, token in enumerate(TOKENS)}
    text = {**_TEXT, "vocab_size": vocabulary, "bos_token_id": None, **ends}
    config = FAMILIES[family](text, ids)
    if "eos_token_id" in ends:
        config.eos_token_id = ends["eos_token_id"]
    return config


def save_base(family: str, folder: Path, tokenizer: Any) -> Path:
    """Save a model in bf16 with a tokenizer, and a processor's file, which only vision reads."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForImageTextToText

    tokenizer.add_tokens(list(TOKENS), special_tokens=True)
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in TOKENS}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = make_config(family, -(-len(tokenizer) // 64) * 64, ids, **ends)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / PROCESSOR).write_text('{"do_resize": true}')
    path, names = folder / "model.safetensors", _RELEASED.get(family, ())
    tensors = load_file(path)
    for saved, released in names:
        tensors = {
            released + key.removeprefix(saved)
            if key.startswith(saved) and not key.startswith(released) else key: tensor
            for key, tensor in tensors.items()
        }  # fmt: skip
    save_file(tensors, path, metadata={"format": "pt"})
    return folder
