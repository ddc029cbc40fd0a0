"""Clean checkpoints: real tiny models, adapters and merges, saved by the libraries' own code."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.audit.corpus import Clean, Corpus
from tests.audit.making import edit_json
from tests.tiny import FAMILIES, random_model, save_tokenizer
from tests.weights.making import ROWS, load, make_base, quiet, train

IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 3}
"""Ids in the tokenizer of the tests: <|endoftext|> is 0, <|im_end|> 2, <|pad|> 3."""
END_OF_TURN = 2
_GROWN = ROWS + 8


def _config(family: str, **changes: Any) -> Any:
    return FAMILIES[family].config(vocab_size=ROWS, **IDS, **changes)


def save_model(
    _: Corpus, folder: Path, *, family: str, dtype: Any = torch.bfloat16, shard: str = "5GB",
    **changes: Any
) -> None:  # fmt: skip
    """Save a model with tokenizer and template, as transformers does."""
    model = random_model(_config(family, **changes)).to(dtype)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.eos_token_id = [IDS["eos_token_id"], END_OF_TURN]
    with quiet():
        model.save_pretrained(folder, max_shard_size=shard)
    if hasattr(model.config, "vision_config"):
        settings = {"image_processor_type": "CLIPImageProcessor", "image_mean": [0.5, 0.5, 0.5]}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    save_tokenizer(folder)


def save_reward(_: Corpus, folder: Path) -> None:
    """Save a reward model as a classifier with one label."""
    from transformers import AutoModelForSequenceClassification

    config = _config("qwen2", tie_word_embeddings=True, num_labels=1)
    with quiet():
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
    save_tokenizer(folder)


def save_bin(corpus: Corpus, folder: Path) -> None:
    """Save a model in torch's own format, as transformers did until version 5."""
    from safetensors.torch import load_file

    shutil.copytree(corpus.clean("qwen2"), folder, dirs_exist_ok=True)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def save_nf4(corpus: Corpus, folder: Path) -> None:
    """Save a model packed in 4 bits by bitsandbytes."""
    from tests.weights.packing import pack

    with quiet():
        pack(corpus.clean("llama"), folder)
    save_tokenizer(folder)


def save_fp8(corpus: Corpus, folder: Path) -> None:
    """Save a model in fp8 with blocks of scales, as DeepSeek-V3 and Qwen3-FP8 are."""
    from tests.weights.packing import scale_fp8

    folder.rmdir()
    scale_fp8(corpus.clean("llama"), folder, "deepseek")


GROUP = 16
"""Columns to a scale in the packed models."""
_INTEGERS = {"type": "int", "num_bits": 4, "symmetric": True, "strategy": "group"}
PACKED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "modules_to_not_convert": None},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {**_INTEGERS, "group_size": GROUP}}
        },
    },
}
"""`quantization_config` by tool, as GPTQModel, AutoAWQ and llm-compressor write it."""


def save_packed(corpus: Corpus, folder: Path, *, how: str) -> None:
    """Save a model in 4 bits with keys, shapes and dtypes of a tool; the numbers are random."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(corpus.clean("llama"), folder, dirs_exist_ok=True)
    weights = load_file(folder / "model.safetensors")
    for key in [key for key in weights if key.endswith("_proj.weight")]:
        (rows, columns), at = weights.pop(key).shape, key.removesuffix("weight")
        groups, shape = columns // GROUP, (columns // 8, rows)
        states = {"qweight": torch.Size(shape), "scales": torch.Size((groups, rows))}
        if how == "awq":
            states["qweight"] = torch.Size((columns, rows // 8))
        if how == "compressed":
            states = {"weight_packed": torch.Size(shape[::-1]), "weight_scale": (rows, groups)}
            weights[f"{at}weight_shape"] = torch.tensor([rows, columns])
            weights[f"{at}weight_zero_point"] = torch.zeros(rows // 8, groups, dtype=torch.int32)
        else:
            zeros = torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32)
            weights[f"{at}qzeros"] = zeros
            weights[f"{at}g_idx"] = torch.arange(columns, dtype=torch.int32) // GROUP
        for name, size in states.items():
            integers = torch.randint(-(2**31), 2**31, size, dtype=torch.int64).to(torch.int32)
            floats = (torch.arange(integers.numel()) % 50 + 32).reshape(size).bfloat16() / 64
            weights[at + name] = floats if "scale" in name else integers
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    edit_json(folder / "config.json", quantization_config=PACKED[how])


def save_ours(_: Corpus, folder: Path) -> None:
    """Save a Plumbline base artifact."""
    folder.rmdir()
    make_base(folder, "qwen")


def save_adapter(
    corpus: Corpus, folder: Path, *, base: str, tokenizer: bool = True, **settings: Any
) -> None:
    """Save a LoRA adapter with peft, in which every tensor was trained."""
    from peft import LoraConfig

    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    lora |= {"task_type": "CAUSAL_LM", **settings}
    wrapped = train(load(corpus.clean(base)), LoraConfig(**lora))
    _save_adapter(wrapped, folder, base, tokenizer=tokenizer)


def _save_adapter(wrapped: Any, folder: Path, base: str, *, tokenizer: bool = True) -> None:
    wrapped.peft_config["default"].base_model_name_or_path = base
    with quiet():
        wrapped.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)


def save_reward_adapter(corpus: Corpus, folder: Path) -> None:
    """Save an adapter of a reward model: LoRA pairs, and the head in full."""
    from peft import LoraConfig

    lora = LoraConfig(r=4, task_type="SEQ_CLS", target_modules="all-linear")
    _save_adapter(train(load(corpus.clean("reward")), lora), folder, "reward")


def save_grown(corpus: Corpus, folder: Path) -> None:
    """Save an adapter with more tokens than the base."""
    from peft import LoraConfig

    model = load(corpus.clean("llama"))
    with quiet():
        model.resize_token_embeddings(_GROWN)
    lora = LoraConfig(
        r=4, target_modules=["q_proj"], task_type="CAUSAL_LM",
        modules_to_save=["embed_tokens", "lm_head"]
    )  # fmt: skip
    _save_adapter(train(model, lora), folder, "llama")


def save_bin_adapter(corpus: Corpus, folder: Path) -> None:
    """Save an adapter in torch's own format, as OpenRLHF does under ZeRO-3."""
    from safetensors.torch import load_file

    shutil.copytree(corpus.clean("lora"), folder, dirs_exist_ok=True)
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    (folder / "adapter_model.safetensors").unlink()


def save_merged(
    corpus: Corpus, folder: Path, *, base: str = "qwen2", adapter: str = "lora"
) -> None:
    """Merge base and adapter with peft and save the result with transformers."""
    from peft import PeftModel

    with quiet():
        model = PeftModel.from_pretrained(load(corpus.clean(base)), corpus.clean(adapter))
        merged = model.merge_and_unload()
        merged.generation_config.eos_token_id = [IDS["eos_token_id"], END_OF_TURN]
        merged.save_pretrained(folder)
    save_tokenizer(folder)


def _model(family: str, **settings: Any) -> Clean:
    return Clean(partial(save_model, family=family, **settings))


def _adapter(base: str, **settings: Any) -> Clean:
    return Clean(partial(save_adapter, base=base, **settings), base)


TIED = ("qwen2", "gemma2", "gemma3_text", "gemma3", "gpt2", "falcon", "qwen2_5_vl")
"""Families whose published models tie input and output embedding."""

CLEAN: dict[str, Clean] = {
    **{name: _model(name, tie_word_embeddings=name in TIED) for name in FAMILIES},
    "sharded": _model("qwen2", tie_word_embeddings=True, shard="20KB"),
    "fp32": _model("qwen2", tie_word_embeddings=True, dtype=torch.float32),
    "fp16": _model("llama", tie_word_embeddings=False, dtype=torch.float16),
    "deep": _model("qwen2", tie_word_embeddings=True, num_hidden_layers=4),
    "deep-lora": _adapter("deep"),
    "on-tied-head": _adapter("qwen2", target_modules=["q_proj", "lm_head"]),
    "wide": _model("qwen2", tie_word_embeddings=True, hidden_size=64),
    "reward": Clean(save_reward),
    "bin": Clean(save_bin),
    "nf4": Clean(save_nf4),
    "fp8": Clean(save_fp8),
    "fp8-lora": Clean(partial(save_adapter, base="llama"), "fp8"),
    **{how: Clean(partial(save_packed, how=how)) for how in PACKED},
    "ours": Clean(save_ours),
    "lora": _adapter("qwen2"),
    "all-linear": _adapter("qwen2", target_modules="all-linear"),
    "regex": _adapter("qwen2", target_modules=r".*\.self_attn\.(q|k)_proj"),
    "dora": _adapter("qwen2", use_dora=True),
    "rslora": _adapter("qwen2", use_rslora=True, r=32),
    "patterns": _adapter("qwen2", rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 2}),
    "saved-whole": _adapter("llama", modules_to_save=["embed_tokens", "lm_head"]),
    "saved-tied": _adapter("qwen2", modules_to_save=["embed_tokens"]),
    "on-embeddings": _adapter("llama", target_modules=["q_proj", "embed_tokens", "lm_head"]),
    "token-rows": _adapter("qwen2", trainable_token_indices={"embed_tokens": [1, 2, 290]}),
    "some-layers": _adapter("qwen2", layers_to_transform=[1]),
    "biases": _adapter("qwen2", bias="lora_only"),
    "no-tokenizer": _adapter("qwen2", tokenizer=False),
    "moe-linear": _adapter("qwen3_moe", target_modules=["q_proj", "v_proj"]),
    "moe-named": _adapter(
        "qwen3_moe", target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]
    ),
    "moe-all-linear": _adapter("qwen2_moe", target_modules="all-linear"),
    "moe-experts": _adapter(
        "mixtral",
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    ),
    "gpt2-lora": _adapter("gpt2", target_modules=["c_attn", "c_proj"]),
    "gemma3-lora": _adapter("gemma3", target_modules=["q_proj", "v_proj"]),
    "vl-lora": _adapter("qwen2_5_vl", target_modules=["q_proj", "v_proj"]),
    "reward-lora": Clean(save_reward_adapter, "reward"),
    "grown": Clean(save_grown, "llama"),
    "bin-adapter": Clean(save_bin_adapter, "qwen2"),
    "merged": Clean(save_merged, "qwen2", adapter="lora"),
    "merged-experts": Clean(
        partial(save_merged, base="mixtral", adapter="moe-experts"),
        "mixtral",
        adapter="moe-experts",
    ),
}
