"""Llama models with random weights and a tokenizer of whole words, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.shapes import Size

TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


def write_llama(folder: Path, size: Size, *, dtype: str) -> None:
    """A model of that size and its tokenizer, as `save_pretrained` writes them.

    Args:
        folder: made.
        size: of the model.
        dtype: torch name of its weights'.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    tokenizer = word_tokenizer(size.vocabulary)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def word_tokenizer(vocabulary: int) -> Any:
    """A word is a token; the special ones first."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|im_start|>", "<|im_end|>", "<|pad|>", "user", "assistant", "<|unk|>"]
    words = [*special, *(f"w{i}" for i in range(vocabulary - len(special)))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", unk_token="<|unk|>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer
