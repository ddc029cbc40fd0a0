"""What online learning is timed on, made on the spot: Llama models, an adapter, prompts, a reward.

A word is a token. (For a Qwen2 model transformers 5 takes Qwen2's kind of tokenizer whatever its
files say, and that knows none of these words.) Weights are random.
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
"""Of the adapter that is rolled out and trained."""
HANDED_RANK = 64
"""Of the adapter that is handed over."""

PROMPTS = 64
PROMPT_LENGTHS = (16, 64)
REPLY_LENGTHS = (16, 128)
"""Both ends included."""

ENDS = 1 / 64
"""How likely each token of a model that ends its replies by itself is the last one."""
MAX_TOKENS = 128
"""Of such replies: 55 on average then, and one in eight is cut."""

REWARD = """\
def score(completions, **columns):
    return [float(sum(map(ord, one[0]["content"])) % 97) for one in completions]
"""
"""A number that differs from reply to reply: what it rewards does not matter to the clock."""


def make_base(folder: Path, name: str) -> None:
    """A model of that size, in bf16; its replies are as long as they are asked to be."""
    write_llama(folder, SIZES[name], dtype="bfloat16")


def make_ending_base(folder: Path, name: str) -> None:
    """The same, but its replies end by themselves."""
    write_llama(folder, SIZES[name], dtype="bfloat16", ends=ENDS)


def make_adapter(folder: Path, base: str) -> None:
    """A LoRA adapter on all linear layers of that base, both of its matrices random."""
    import torch
    from peft import get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    torch.manual_seed(1)
    model = get_peft_model(model, lora_config(init_lora_weights=False))
    model.to(torch.bfloat16).save_pretrained(folder)


def lora_config(**more: Any) -> Any:
    """The adapter as peft describes it, for peers."""
    from peft import LoraConfig

    targets = {"target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return LoraConfig(r=RANK, lora_alpha=2 * RANK, **targets, **more)


def make_prompts(folder: Path, *, vocabulary: int, count: int, length: int) -> None:
    """A dataset artifact of prompts that are so many words long, and a reward function beside it.

    Two are held out.
    """
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for split, size in (("train", count), ("heldout", 2)):
        words = draw.integers(0, vocabulary - 10, (size, length))
        texts = [" ".join(f"w{i}" for i in one) for one in words]
        lines = [
            json.dumps({"id": f"{split}{i}", "messages": [{"role": "user", "content": text}]})
            for i, text in enumerate(texts)
        ]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "reward.py").write_text(REWARD)


def draw_prompts(vocabulary: int) -> list[list[int]]:
    """Token ids of the prompts that are rolled out; the same ones for everyone."""
    draw = np.random.default_rng(3)
    low, high = PROMPT_LENGTHS
    lengths = draw.integers(low, high + 1, PROMPTS)
    return [draw.integers(10, vocabulary, length).tolist() for length in lengths]


def draw_lengths() -> list[int]:
    """How many tokens each prompt is answered with."""
    low, high = REPLY_LENGTHS
    return [int(n) for n in np.random.default_rng(4).integers(low, high + 1, PROMPTS)]
