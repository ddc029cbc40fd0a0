"""Make the inputs of `make bench-rl`: Llama models, an adapter, prompts and a reward function.

Weights are random, and each word is a token. (The models are not Qwen2, because transformers 5 then
ignores the tokenizer's files and uses its own class.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.llama import write_llama
from benchmarks.shapes import Size

SIZES = {
    "tiny": Size("tiny", 128, 256, 2, 4, 2, 300),
    "110M": Size("110M", 768, 2048, 12, 12, 12, 32_000),
    "1.5B": Size("1.5B", 1536, 8960, 28, 12, 2),
}

RANK = 16
"""Rank of the adapter in rollouts and iterations."""
HANDED_RANK = 64
"""Rank of the adapter in weight syncs."""

PROMPTS = 64
PROMPT_LENGTHS = (16, 64)
REPLY_LENGTHS = (16, 128)
"""Shortest and longest response, in tokens."""

ENDS = 1 / 64
"""Probability of EOS at each token of a response in the row about iterations."""
MAX_TOKENS = 128
"""Token limit of such responses: 55 tokens on average, one in eight is cut."""

REWARD = """\
def score(completions, **columns):
    return [float(sum(map(ord, one[0]["content"])) % 97) for one in completions]
"""
"""Reward function: any number that differs between responses; its value does not affect time."""


def make_base(folder: Path, name: str) -> None:
    """Make a model in bf16 whose responses do not end before the token limit."""
    write_llama(folder, SIZES[name], dtype="bfloat16")


def make_ending_base(folder: Path, name: str) -> None:
    """Make a model in bf16 whose responses end with EOS at random."""
    write_llama(folder, SIZES[name], dtype="bfloat16", ends=ENDS)


def make_adapter(folder: Path, base: str) -> None:
    """Make a LoRA adapter on all linear layers of a base, with two random matrices."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    torch.manual_seed(1)
    model = get_peft_model(model, lora_config(init_lora_weights=False))
    model.to(torch.bfloat16).save_pretrained(folder)


def lora_config(**more: Any) -> Any:
    """Return the adapter's configuration for peft."""
    from peft import LoraConfig

    targets = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(r=RANK, lora_alpha=2 * RANK, **targets, **more)


def make_prompts(folder: Path, *, vocabulary: int, count: int, length: int) -> None:
    """Make a dataset of prompts, with two held-out prompts and a reward function.

    Args:
        folder: folder to make.
        vocabulary: size of the model's vocabulary.
        count: number of prompts.
        length: words of each prompt.
    """
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for split, size in (("train", count), ("heldout", 2)):
        words = draw.integers(0, vocabulary - 10, (size, length))
        texts = [" ".join(f"w{i}" for i in row) for row in words]
        lines = [
            json.dumps({"id": f"{split}{i}", "messages": [{"role": "user", "content": text}]})
            for i, text in enumerate(texts)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(REWARD)


def draw_prompts(vocabulary: int) -> list[list[int]]:
    """Return the token ids of the rollout prompts, the same for all contenders."""
    draw = np.random.default_rng(3)
    low, high = PROMPT_LENGTHS
    lengths = draw.integers(low, high + 1, PROMPTS)
    return [draw.integers(10, vocabulary, length).tolist() for length in lengths]


def draw_lengths() -> list[int]:
    """Return the length of the response to each prompt, in tokens."""
    low, high = REPLY_LENGTHS
    return [int(n) for n in np.random.default_rng(4).integers(low, high + 1, PROMPTS)]
