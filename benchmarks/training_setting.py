"""What training is timed on, made on the spot: a Llama-like model, a tokenizer, conversations.

A word is a token, so that lengths are what they are drawn to be: log-normal with mean 180, cut at
1024, four tenths of them prompt. Numbers are random: what is timed does not depend on them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MEAN, SIGMA, SHORTEST, LONGEST = 180, 0.9, 12, 1000
PROMPT_SHARE = 0.4
MICRO = 8
WARM, TIMED = 1, 4
RANK = 16
TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Of a model: width, width within the MLP, layers, heads, words."""

    hidden: int
    inner: int
    layers: int
    heads: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 300),
    "100M": Shape(768, 2048, 12, 12, 32_000),
    "wide": Shape(256, 768, 2, 4, 151_936),
    "1.5B": Shape(2048, 5632, 24, 16, 32_000),
}


def make_base(folder: Path, name: str, *, dtype: str = "float32") -> None:
    """A model of that shape and its tokenizer, as `save_pretrained` writes them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[name]
    tokenizer = word_tokenizer(shape.vocabulary)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
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


def make_data(folder: Path, *, vocabulary: int, lengths: list[int], pairs: bool = False) -> None:
    """A dataset artifact: `train.jsonl` of these lengths, four conversations held out."""
    draw = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in draw.integers(0, vocabulary - 10, max(1, count)))

    def row(number: int, length: int) -> dict[str, Any]:
        prompt = int(PROMPT_SHARE * length)
        asked = [{"role": "user", "content": words(prompt - 6)}]
        first, second = (
            [{"role": "assistant", "content": words(length - prompt - 2)}] for _ in "ab"
        )
        if pairs:
            return {"id": f"s{number}", "prompt": asked, "chosen": first, "rejected": second}
        return {"id": f"s{number}", "messages": asked + first}

    folder.mkdir(parents=True)
    for split, of in (("train", lengths), ("heldout", [16] * 4)):
        lines = [json.dumps(row(i, length)) for i, length in enumerate(of)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def draw_lengths(count: int) -> list[int]:
    """Log-normal lengths with mean 180; the same ones for everyone."""
    mu = np.log(MEAN) - SIGMA**2 / 2
    drawn = np.random.default_rng(4).lognormal(mu, SIGMA, count)
    return [int(x) for x in np.clip(drawn, SHORTEST, LONGEST)]
