"""The one factory of tiny models and tokenizers: real classes, random weights of a seed."""

from __future__ import annotations

import json
from collections.abc import Sequence
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
