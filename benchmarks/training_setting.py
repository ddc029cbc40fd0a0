"""Make the inputs of `make bench-training`: a Llama model, a tokenizer, conversations.

Each word is a token, so lengths are exact: log-normal with mean 180, at most 1000. The prompt is
four tenths of it. Weights and words are random; they do not affect the time.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.llama import write_llama
from benchmarks.shapes import Size

MEAN, SIGMA, SHORTEST, LONGEST = 180, 0.9, 12, 1000
PROMPT_SHARE = 0.4
MICRO = 8
WARM, TIMED = 1, 4
RANK = 16


SHAPES = {
    "tiny": Size("tiny", 64, 128, 2, 4, 4, 300),
    "100M": Size("100M", 768, 2048, 12, 12, 12, 32_000),
    "wide": Size("wide", 256, 768, 2, 4, 4, 151_936),
    "1.5B": Size("1.5B", 2048, 5632, 24, 16, 16, 32_000),
}


def make_base(folder: Path, name: str) -> None:
    """Make a model with this shape, in fp32."""
    write_llama(folder, SHAPES[name], dtype="float32")


def make_data(folder: Path, *, vocabulary: int, lengths: list[int], pairs: bool = False) -> None:
    """Make a dataset: `train.jsonl` with these lengths in tokens, and four held-out rows."""
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

    folder.mkdir(parents=True)
    for split, of in (("train", lengths), ("heldout", [16] * 4)):
        lines = [json.dumps(row(i, length)) for i, length in enumerate(of)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def draw_lengths(count: int) -> list[int]:
    """Return log-normal lengths with mean 180, the same for all contenders."""
    mu = np.log(MEAN) - SIGMA**2 / 2
    lengths = np.random.default_rng(4).lognormal(mu, SIGMA, count)
    return [int(x) for x in np.clip(lengths, SHORTEST, LONGEST)]


def trl_arguments(dtype: str) -> dict[str, Any]:
    """Return the arguments of a TRL configuration that all runs share: no logs, no checkpoints.

    Args:
        dtype: torch dtype name of the weights.
    """
    import torch

    gpu = torch.cuda.is_available()
    return {
        "model_init_kwargs": {"dtype": dtype},
        "use_cpu": not gpu,
        "bf16": dtype == "bfloat16" and gpu,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
