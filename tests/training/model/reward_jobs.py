"""Training jobs of reward models: every kind of adapter under every stage that supports it.

`adapter_jobs.py` trains them in its launches.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from tasks.training.job import Peft, Zero
from tasks.training.tokens.examples import Example, Tokens
from tests.settings import Batch, Optim, Settings
from tests.training.conftest import save_base
from tests.training.datasets import write_examples
from tests.training.model.jobs import Wanted

SETTINGS = Settings(
    objective="reward",
    optim=Optim(lr=2e-3, warmup_ratio=0.1),
    batch=Batch(micro_batch_size=4, global_batch_size=16, max_steps=6, max_len=64),
    save_steps=0,
    probes=9,
)
WIDE = "reward_lora_zero3"
"""Job with a base of width 5120."""
REWARDS = {
    f"reward_{kind}_zero{stage}": replace(
        SETTINGS,
        peft=peft,
        zero=Zero(stage, persistence_threshold=0) if stage == 3 else Zero(stage),
    )
    for kind, peft, stages in (
        ("full", Peft(), (0, 1, 2, 3)),
        ("lora", Peft("lora", rank=4, alpha=8), (0, 1, 2, 3)),
        ("qlora", Peft("qlora", rank=4, alpha=8), (0, 1, 2)),
    )
    for stage in stages
}
REWARDS[WIDE] = replace(REWARDS[WIDE], gradient_checkpointing=True)


def reward_jobs(folder: Path, base: Path, tokenizer: Any) -> dict[str, Wanted]:
    """Write pairs and a wide base to a folder; return the jobs."""
    data = write_pairs(folder / "pairs", tokenizer)
    wide = save_wide(folder / "wide", tokenizer)
    return {
        name: Wanted(job, wide if name == WIDE else base, data) for name, job in REWARDS.items()
    }


def save_wide(folder: Path, tokenizer: Any) -> Path:
    """Save a minimal Qwen2 of width 5120, that of the 14B model, with an untied head."""
    return save_base(
        folder,
        tokenizer,
        hidden_size=5120,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=32,
        num_key_value_heads=1,
        intermediate_size=64,
        tie_word_embeddings=False,
    )


def write_pairs(folder: Path, tokenizer: Any) -> Path:
    """Write pairs whose chosen answer is in capitals."""
    folder.mkdir()
    draw = random.Random(0)

    def tokens(text: str) -> Tokens:
        ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        return Tokens(ids, [False] * 4 + [True] * (len(ids) - 4))

    def example(i: int) -> Example:
        word = "".join(draw.choice("abcdef") for _ in range(draw.randint(5, 12)))
        return Example(f"p{i}", (tokens(f"say: {word.upper()}"), tokens(f"say: {word}")))

    write_examples(folder, [example(i) for i in range(96)], roles=("chosen", "rejected"))
    return folder
