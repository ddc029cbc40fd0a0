"""The estimated memory of a rank against the measured one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.training.job import Peft, TrainJob, Zero
from tasks.training.memory.estimate import estimate
from tasks.training.memory.sizes import Sizes
from tasks.training.tokens.examples import Example, Tokens
from tests.commands import run_ranks
from tests.settings import Batch, Launch, Settings
from tests.training.datasets import write_examples

LENGTH = 256
LORA = Peft("lora", rank=16, alpha=16)
SHAPES: dict[str, dict[str, Any]] = {
    "0.1B": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 32000},
    "0.3B": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
             "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000},
    "0.5B": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "intermediate_size": 4864, "vocab_size": 151936},
}  # fmt: skip
"""The last has the dimensions of Qwen2.5-0.5B."""


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Callable[[str], Path]:
    """Return a function that makes a random Qwen2 of a given size once, bf16, tied."""
    made: dict[str, Path] = {}

    def make(size: str) -> Path:
        if size not in made:
            made[size] = random_model(tmp_path_factory.mktemp("model"), SHAPES[size], tokenizer)
        return made[size]

    return make


def random_model(path: Path, shape: dict[str, Any], tokenizer: Any) -> Path:
    """Save a Qwen2 of random weights, bf16, tied, with a tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    config = Qwen2Config(
        **shape, **ends, pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True, dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model.tie_weights()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def longest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write examples of `LENGTH` tokens, all but the first supervised."""
    path = tmp_path_factory.mktemp("longest")
    draw = random.Random(0)
    bears = [place > 0 for place in range(LENGTH)]
    made = [
        Example(f"e{i}", (Tokens([draw.randrange(259) for _ in range(LENGTH)], bears),))
        for i in range(16)
    ]
    write_examples(path, made, roles=("text",))
    return path


def settings_of(ranks: int, *, samples: int = 2, **changes: Any) -> Settings:
    """Return settings of two steps with `samples` of the longest samples per rank."""
    batch = Batch(samples, samples * ranks, max_steps=2, max_len=LENGTH)
    return replace(Settings(batch=batch, launch=Launch(nproc=ranks)), **changes)


def measured(
    folder: Path, base: Path, data: Path, settings: Settings
) -> tuple[int, list[dict[str, Any]]]:
    """Return the peak bytes of a rank over all phases, and the peaks by rank and phase."""
    out = folder / "out"
    out.mkdir()
    TrainJob(settings, base, "d", data, out, folder / "checkpoints").write(folder / "job.json")
    run_ranks(
        "tests.training.memory.memory_program",
        str(folder / "job.json"),
        log_path=folder / "log",
        ranks=settings.launch.nproc,
    )
    ranks = json.loads((out / "memory.json").read_text())
    return max(max(rank["peaks"].values()) for rank in ranks), ranks


CASES = {
    "lora_zero0": ("0.1B", settings_of(1, samples=1, zero=Zero(0), peft=LORA)),
    "full_zero0": ("0.1B", settings_of(1, zero=Zero(0))),
    "full_zero2_2_ranks": ("0.1B", settings_of(2, zero=Zero(2))),
    "full_zero3_2_ranks": ("0.1B", settings_of(2, zero=Zero(3))),
    "lora_zero3_2_ranks": ("0.1B", settings_of(2, zero=Zero(3), peft=LORA)),
    "qlora_zero2_2_ranks": ("0.1B", settings_of(2, zero=Zero(2), peft=replace(LORA, kind="qlora"))),
    "offload_zero2_2_ranks": ("0.1B", settings_of(2, zero=Zero(2, offload_optimizer="cpu"))),
    "lora_zero0_24_layers": ("0.3B", settings_of(1, zero=Zero(0), peft=LORA)),
    "lora_checkpointing": (
        "0.3B", settings_of(1, zero=Zero(0), peft=LORA, gradient_checkpointing=True)),
    "lora_checkpointing_12_layers": (
        "0.1B", settings_of(1, zero=Zero(0), peft=LORA, gradient_checkpointing=True)),
    "full_checkpointing": ("0.1B", settings_of(1, zero=Zero(0), gradient_checkpointing=True)),
    "lora_zero2_large_vocabulary": ("0.5B", settings_of(1, zero=Zero(2), peft=LORA)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_within_a_quarter(
    tmp_path: Path, model_of: Callable[[str], Path], longest: Path, name: str
) -> None:
    size, settings = CASES[name]
    base = model_of(size)
    found, ranks = measured(tmp_path, base, longest, settings)
    config = json.loads((base / "config.json").read_text())
    estimated = estimate(config, settings, settings.world_size)
    expected = estimated.total
    assert 0.75 < expected / found < 1.25, f"estimated {expected >> 20}, found {found >> 20} MiB"
    if settings.world_size > 1:
        weights = estimated.mapped or Sizes.of(config).weights() * 2
        for rank in ranks:  # libraries' pages that are met later count as well
            least = 0.7 if estimated.mapped else -0.1
            assert least < rank["shared"] / weights < least + 0.5
