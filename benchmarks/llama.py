"""Make Llama models with random weights and a tokenizer of whole words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.shapes import Size

TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)

SHARED = 2.0
"""First component of every embedding; the others are about 0.02."""


def write_llama(folder: Path, size: Size, *, dtype: str, ends: float | None = None) -> None:
    """Write a model and its tokenizer with `save_pretrained`.

    Args:
        folder: folder to make.
        size: dimensions of the model.
        dtype: torch dtype name of its weights.
        ends: probability of EOS at every step of a response; None leaves it random. With None the
            head is tied to the embedding, otherwise it is a separate matrix.
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
        tie_word_embeddings=ends is None,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if ends is not None:
        _end_by_chance(model, ends)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _end_by_chance(model: Any, ends: float) -> None:
    """Give EOS the same probability after any text.

    Every embedding gets the same large first component, so all last hidden states have a direction
    in common. The head's row of EOS is a multiple of that direction, found by bisection.
    """
    import torch

    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = SHARED
        texts = torch.randint(6, model.config.vocab_size, (8, 64))
        states = model.model(input_ids=texts).last_hidden_state.flatten(0, 1)
        head = model.get_output_embeddings().weight
        common = states.mean(0) / states.mean(0).square().sum()
        others = (states @ head.t()).logsumexp(-1)
        low, high = 0.0, 40.0
        for _ in range(40):
            middle = (low + high) / 2
            chance = torch.sigmoid(middle * (states @ common) - others).mean()
            low, high = (middle, high) if chance < ends else (low, middle)
        head[model.config.eos_token_id] = low * common


def word_tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer with one token for each word, special tokens first."""
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
