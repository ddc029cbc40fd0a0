"""Training jobs of the adapter tests: the variants of section `peft`; reward models go along.

Two ranks train them a few steps each, under ZeRO-2 and ZeRO-3: those of the default suite in one
launch, and the others, for slow tests, in a second one. The persistence threshold is 0: with
DeepSpeed's default ZeRO-3 would not partition a model this small.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.training.job import Peft, Zero
from tasks.training.tokens.examples import Example, Tokens
from tasks.weights.tokens.add_tokens import grow
from tests.settings import Batch, Optim, Settings
from tests.training.conftest import save_base
from tests.training.datasets import write_examples
from tests.training.model.jobs import Left, Wanted, run_jobs
from tests.training.model.reward_jobs import reward_jobs

ZERO3 = Zero(3, persistence_threshold=0)
LORA = Peft("lora", rank=4, alpha=8)
BASIC = Settings(
    optim=Optim(lr=5e-3, warmup_ratio=0.1),
    batch=Batch(micro_batch_size=4, global_batch_size=8, max_steps=4, max_len=64),
    peft=LORA,
    probes=8,
)
OPTIONS = {
    "dora": replace(LORA, use_dora=True),
    "pissa": replace(LORA, init="pissa"),
    "patterns": replace(
        LORA,
        use_rslora=True,
        rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 6},
        alpha_pattern={"q_proj": 32.0},
        exclude_modules=("down_proj",),
        modules_to_save=("embed_tokens",),
    ),
}
ADAM_8BIT = replace(BASIC, peft=Peft(), optim=replace(BASIC.optim, optimizer="adamw_8bit"))
CHECKPOINTED = replace(BASIC, zero=ZERO3, gradient_checkpointing=True)
SETTINGS = {
    **{f"{name}_zero2": replace(BASIC, peft=peft) for name, peft in OPTIONS.items()},
    **{f"{name}_zero3": replace(BASIC, peft=peft, zero=ZERO3) for name, peft in OPTIONS.items()},
    "lora_zero2": BASIC,
    "checkpointed_zero3": CHECKPOINTED,
    "reentrant_zero3": replace(CHECKPOINTED, gradient_checkpointing_reentrant=True),
    "fp4_pissa": replace(
        BASIC,
        peft=replace(LORA, kind="qlora", quant_type="fp4", double_quant=False, init="pissa"),
    ),
    "8bit": ADAM_8BIT,
    "8bit_zero3": replace(ADAM_8BIT, zero=ZERO3),
}
ROWS = {
    "rows_zero2": replace(BASIC, new_tokens=("copy", "<tool>")),
    "rows_zero3": replace(BASIC, new_tokens=("copy", "<tool>"), zero=ZERO3),
    "rows_untied_zero3": replace(BASIC, new_tokens=("copy", "<tool>"), zero=ZERO3),
    "rows_full_zero3": replace(BASIC, new_tokens=("copy", "<tool>"), peft=Peft(), zero=ZERO3),
}
FP32 = replace(BASIC, dtype="float32", probes=1)
FP32_JOBS = {"fp32_zero2": FP32, "fp32_zero3": replace(FP32, zero=ZERO3)}
DEFAULT = (
    "dora_zero2", "dora_zero3", "pissa_zero3", "patterns_zero3", "lora_zero2", "8bit_zero3",
    "rows_untied_zero3", "reward_lora_zero3",
)  # fmt: skip
"""Jobs of the default suite; each kind of adapter under the stage that partitions the most."""
ADAPTED = [
    name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow)
    for name, settings in (SETTINGS | ROWS).items()
    if settings.peft.kind != "none"
]


class Adapted(Mapping[str, Left]):
    """Files of every job, by name. The first access to a job trains all of its launch."""

    def __init__(self, folder: Path, base: Path, tokenizer: Any) -> None:
        data = folder / "examples"
        data.mkdir()
        write_words(data, tokenizer, tokenizer("copy")["input_ids"])
        self._wanted = {n: Wanted(job, base, data) for n, job in (SETTINGS | FP32_JOBS).items()}
        self._wanted |= _with_new_rows(folder, base, tokenizer)
        self._wanted |= reward_jobs(folder, base, tokenizer)
        self._folder = folder
        self._left: dict[str, Left] = {}

    def __getitem__(self, name: str) -> Left:
        if name not in self._left:
            default = name in DEFAULT
            wanted = {n: job for n, job in self._wanted.items() if (n in DEFAULT) is default}
            folder = self._folder / ("default_jobs" if default else "slow_jobs")
            self._left |= run_jobs(folder, wanted)
        return self._left[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)


def write_words(folder: Path, tokenizer: Any, begin: list[int]) -> Path:
    """Write 64 examples: the given ids, and a word to copy."""
    draw = random.Random(0)

    def example(i: int) -> Example:
        word = "".join(draw.choice("abcdef") for _ in range(draw.randint(3, 9)))
        ids = [*begin, *tokenizer(f" {word}: {word}")["input_ids"], tokenizer.eos_token_id]
        return Example(f"s{i}", (Tokens(ids, [False] * 5 + [True] * (len(ids) - 5)),))

    write_examples(folder, [example(i) for i in range(64)], roles=("text",))
    return folder


def _with_new_rows(folder: Path, base: Path, tokenizer: Any) -> dict[str, Wanted]:
    """Make bases with two new tokens, and examples that begin with the first of them."""
    shutil.copytree(base, folder / "tied")
    save_base(folder / "untied", tokenizer, tie_word_embeddings=False)
    for kind in ("tied", "untied"):
        grow(folder / kind, ["copy", "<tool>"], multiple=8)
    data = folder / "examples_with_new_tokens"
    data.mkdir()
    write_words(data, tokenizer, [259])
    return {
        name: Wanted(one, folder / ("untied" if "untied" in name else "tied"), data)
        for name, one in ROWS.items()
    }
