"""The estimated memory of a rank against the measured one."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.training.job import Peft, TrainJob, Zero
from tasks.training.memory.estimate import estimate
from tasks.training.memory.mfu import Meter, meter, step_flops
from tasks.training.memory.sizes import Sizes
from tasks.training.tokens.examples import Example, Tokens
from tasks.training.tokens.order import Counts
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


def measured(folder: Path, base: Path, data: Path, settings: Settings) -> int:
    """Return the peak bytes of a rank over all phases."""
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
    return max(max(rank["peaks"].values()) for rank in ranks)


CASES = {
    "full_zero2_2_ranks": ("0.1B", settings_of(2, zero=Zero(2))),
    "lora_zero3_2_ranks": ("0.1B", settings_of(2, zero=Zero(3), peft=LORA)),
    "lora_checkpointing": (
        "0.3B", settings_of(1, zero=Zero(0), peft=LORA, gradient_checkpointing=True)),
    "lora_zero2_large_vocabulary": ("0.5B", settings_of(1, zero=Zero(2), peft=LORA)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_estimate_is_within_a_quarter(
    tmp_path: Path, model_of: Callable[[str], Path], longest: Path, name: str
) -> None:
    size, settings = CASES[name]
    base = model_of(size)
    most = measured(tmp_path, base, longest, settings)
    config = json.loads((base / "config.json").read_text())
    expected = estimate(config, settings, settings.world_size).total
    assert 0.75 < expected / most < 1.25, f"estimated {expected >> 20}, measured {most >> 20} MiB"


def test_model_flops_utilisation_of_one_long_sequence(tmp_path: Path) -> None:
    """6 N + 12 L H Q T per token (PaLM), with every token supervised; none on a CPU."""
    import torch

    sizes = Sizes(
        hidden=4, intermediate=6, layers=2, vocab=10, heads=2, kv_heads=1, head_dim=2, tied=True
    )
    linear = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6)
    counts = Counts(1, (512,), 512, 512**2)
    flops = step_flops(sizes, Settings(), counts)
    assert flops == 512 * (6 * (linear + 40) + 12 * 2 * 2 * 2 * 512)
    assert Meter(sizes, Settings(), peak=4 * flops).mfu(counts, 0.5) == 0.5
    job = TrainJob(Settings(), *[tmp_path, "d", tmp_path, tmp_path, tmp_path])
    assert meter(job, SimpleNamespace(device=torch.device("cpu"), world_size=1)) is None
