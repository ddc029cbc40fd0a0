"""Make a tiny real model of every family with its own `save_pretrained`, and merge adapters."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.weights.files.reader import read_checkpoint
from tasks.weights.lora import changes, read_adapter, require_values
from tasks.weights.merge import merged_config, plan_merge
from tasks.weights.model import model_facts
from tasks.weights.model_class import auto_class
from tasks.weights.plan import Plan
from tasks.weights.proof import recompute
from tasks.weights.rounding import Rounding
from tasks.weights.write import write
from tasks.weights.written import Executed
from tests import tiny
from tests.tiny import random_model
from tests.weights.adapters.making import quiet, save

SIZES = {
    **tiny.SIZES,
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

        return getattr(transformers, name)(**{**SIZES, **own, **changes})

    return make


def _gpt2(**changes: Any) -> Any:
    from transformers import GPT2Config

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2Config(**{**SIZES, **sizes, **changes})


def _falcon(**changes: Any) -> Any:
    from transformers import FalconConfig

    kept = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
    return FalconConfig(**{**kept, "alibi": False, **changes})


def _gemma3(**changes: Any) -> Any:
    from transformers import Gemma3Config

    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = {**SIZES, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
    own = {"mm_tokens_per_image": 4, "image_token_index": 95}
    return Gemma3Config(text_config={**text, **changes}, vision_config=vision, **own, **changes)


def _qwen2_5_vl(**changes: Any) -> Any:
    from transformers import Qwen2_5_VLConfig

    width = changes.get("hidden_size", SIZES["hidden_size"])
    vision = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
        "out_hidden_size": width, "patch_size": 14, "fullatt_block_indexes": [0],
    }  # fmt: skip
    pairs = width // SIZES["num_attention_heads"] // 2
    time, height = pairs // 4, (pairs - pairs // 4) // 2
    section = [time, height, pairs - time - height]
    rope = {"rope_type": "default", "mrope_section": section, "rope_theta": 10000.0}
    ids = {"image_token_id": 93, "video_token_id": 94, "vision_start_token_id": 92}
    text = {**SIZES, "rope_parameters": rope, **changes}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids, **changes)


_MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}
_DEEPSEEK = {
    "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 12,
    "kv_lora_rank": 12, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
BF16 = torch.bfloat16

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
    "deepseek_v3": Family(_config("DeepseekV3Config", **_DEEPSEEK), FUSED),
    "qwen2_5_vl": Family(_qwen2_5_vl),
}


def save_base(folder: Path, family: str, *, tied: bool) -> Path:
    """Save the family's model."""
    random_model(FAMILIES[family].config(tie_word_embeddings=tied)).save_pretrained(folder)
    return folder


def load(folder: Path, dtype: Any = torch.bfloat16) -> Any:
    """Load a model with transformers; missing or unexpected keys fail."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    model, info = auto_class(config).from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval()


def save_adapter(folder: Path, base: Path, family: str, **settings: Any) -> Path:
    """Save a LoRA adapter of rank 3 with random tensors, as peft writes it."""
    from peft import LoraConfig, get_peft_model

    entry = FAMILIES[family]
    experts = {"target_parameters": list(entry.experts) or None}
    options = {"r": 3, "lora_alpha": 5, "target_modules": entry.targets, **experts, **settings}
    model = get_peft_model(load(base), LoraConfig(**options))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return save(model, folder)


def merge(
    base: Path, adapter: Path, out: Path, rounding: Rounding = "nearest"
) -> tuple[Plan, Executed]:
    """Merge on disk as the stage does: plan, validate, execute, recompute sampled rows."""
    read, facts = read_adapter(adapter), model_facts(base)
    total = changes(read, facts)
    require_values(read, total.copies)
    sources = {"base": read_checkpoint(base), "adapter": read.tensors}
    plan = plan_merge(sources["base"], facts, total, rounding=rounding)
    out.mkdir()
    done = write(plan, sources, out, workers=1)
    checked = recompute(plan, sources, read_checkpoint(out))
    assert [result for result in checked if result.wrong or result.skipped] == []
    for path in base.glob("*config.json"):
        shutil.copy(path, out)
    config = json.loads((base / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(merged_config(config, plan)))
    return plan, done


def merged_by_peft(base: Path | Any, adapter: Path, dtype: Any = BF16) -> Any:
    """Merge with peft in fp32, and cast once; `base` is a folder or a model in fp32."""
    from peft import PeftModel

    model = load(base, torch.float32) if isinstance(base, Path) else base
    with quiet():
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return model.to(dtype).eval()


def merged_as_trained(base: Path, adapter: Path, dtype: Any = BF16) -> Any:
    """Merge with peft in fp32 into the base that QLoRA dequantizes, and cast once."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    four = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=four, dtype=BF16)
    return merged_by_peft(model.dequantize().float(), adapter, dtype=dtype)
