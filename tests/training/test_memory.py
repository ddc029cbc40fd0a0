"""The estimate of a rank's memory against what one really takes."""

from __future__ import annotations

import json
import logging
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.launch import launch, python_child
from tasks.training.examples import Example, Tokens, write_examples
from tasks.training.job import Batch, Peft, Settings, TrainJob, Zero
from tasks.training.memory import estimate

LENGTH = 256
SETTINGS = Settings(
    batch=Batch(micro_batch_size=2, global_batch_size=4, max_steps=2, max_len=LENGTH)
)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """Qwen2 of 0.1 B parameters, random, bf16."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    path = tmp_path_factory.mktemp("large")
    config = Qwen2Config(
        vocab_size=32000,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        intermediate_size=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def longest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Examples of `LENGTH` tokens each, all of which but the first bear loss."""
    path = tmp_path_factory.mktemp("longest")
    draw = random.Random(0)
    made = [
        Example(f"e{i}", (Tokens([draw.randrange(259) for _ in range(LENGTH)],
                                 [place > 0 for place in range(LENGTH)]),))
        for i in range(16)
    ]  # fmt: skip
    write_examples(path, made, roles=("text",), notes={})
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        replace(SETTINGS, zero=Zero(2)),
        replace(SETTINGS, zero=Zero(3), peft=Peft("lora", rank=16, alpha=16)),
    ],
    ids=["full_zero2", "lora_zero3"],
)
def test_the_estimate_is_within_a_quarter(
    tmp_path: Path, large: Path, longest: Path, settings: Settings
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    TrainJob(settings, large, "d", longest, out, tmp_path / "checkpoints").write(
        tmp_path / "job.json"
    )
    flags = ("--standalone", "--nproc-per-node", "2", "-m", "tests.training.memory_program")
    launch(
        python_child("torch.distributed.run", *flags, str(tmp_path / "job.json")),
        stage="memory",
        log=logging.getLogger("test"),
        log_path=tmp_path / "log",
        env={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    config = json.loads((large / "config.json").read_text())
    expected = estimate(config, settings, 2).total
    for rank in json.loads((out / "memory.json").read_text()):
        assert 0.75 < expected / max(rank.values()) < 1.25
