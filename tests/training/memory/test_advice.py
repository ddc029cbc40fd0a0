"""Advice on memory: every setting saves what it claims, and the chosen ones are enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tasks.training.engine.failure import smaller
from tasks.training.job import Peft, Zero
from tasks.training.memory.advice import Adviser
from tasks.training.memory.estimate import LIBRARIES
from tests.settings import Batch, Launch, Optim, Settings

QWEN_72B: dict[str, Any] = {
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 152064,
}
GIB = 2**30
FULL = Settings(zero=Zero(1), batch=Batch(micro_batch_size=4, max_len=4096), launch=Launch(nproc=8))


@pytest.mark.parametrize("gpu", [True, False])
def test_settings_save_what_they_claim_and_the_largest_comes_first(gpu: bool) -> None:
    adviser = Adviser(QWEN_72B, gpu=gpu)
    knobs = adviser.knobs(FULL)
    now = adviser.need(FULL)
    assert [knob.saves for knob in knobs] == sorted((k.saves for k in knobs), reverse=True)
    for knob in knobs:
        assert adviser.need(knob.settings) == now - knob.saves
        assert str(knob) == f"{knob.override} (saves {knob.saves / GIB:.2f} GiB)"
    names = [knob.override for knob in knobs]
    assert ("zero.offload_optimizer=cpu" in names) == gpu  # on a CPU it is in host memory anyway
    assert ("train.nproc=4" in names) == (not gpu)
    assert {"zero=zero3", "peft=lora", "peft=qlora", "train.gradient_checkpointing=true"} <= {
        *names
    }


def test_only_settings_that_the_preflight_accepts_are_advised() -> None:
    single = replace(FULL, dtype="float32")
    assert "peft=qlora" not in [knob.override for knob in Adviser(QWEN_72B, gpu=True).knobs(single)]
    assert "zero.offload_optimizer=cpu" in smaller(FULL)
    eight = replace(FULL, optim=Optim(optimizer="adamw_8bit"))
    assert "zero.offload_optimizer=cpu" not in smaller(eight)


def test_long_rows_are_shared_where_ranks_and_heads_allow_it() -> None:
    long = replace(FULL, batch=Batch(micro_batch_size=1, max_len=131_072), peft=Peft("lora"))
    adviser = Adviser(QWEN_72B, gpu=True)

    def advised(settings: Settings) -> set[str]:
        names = [knob.override for knob in adviser.knobs(settings)]
        return {name for name in names if name.startswith("train.sequence_parallel")}

    assert advised(long) == {"train.sequence_parallel=2"}
    shared = replace(long, launch=replace(long.launch, sequence_parallel=2))
    assert advised(shared) == {"train.sequence_parallel=4"}
    assert advised(replace(long, launch=replace(long.launch, nproc=3))) == set()
    assert advised(replace(long, attn_implementation="flash_attention_2")) == set()
    assert advised(replace(long, objective="grpo")) == set()
    odd = Adviser({**QWEN_72B, "num_attention_heads": 7, "head_dim": 128}, gpu=True)
    assert not any("sequence" in knob.override for knob in odd.knobs(long))


def test_settings_named_together_are_enough() -> None:
    adviser = Adviser(QWEN_72B, gpu=True)
    limit = 80 * GIB
    assert adviser.need(FULL) > limit
    together = adviser.enough(FULL, limit)
    assert together[0] == adviser.knobs(FULL)[0].override
    keys = [one.partition("=")[0] for one in together]
    assert len(keys) == len(set(keys)) > 1  # what to type: each key once
    assert adviser.words(FULL, limit)[-1] == f"all of: {' '.join(together)}"
    assert adviser.enough(FULL, 10 * LIBRARIES // 8) == []  # nothing brings it there


def test_settings_in_use_are_not_advised() -> None:
    done = replace(
        FULL, zero=Zero(2), peft=Peft("qlora", rank=8), gradient_checkpointing=True,
        batch=Batch(micro_batch_size=1, max_len=2),
    )  # fmt: skip
    assert Adviser(QWEN_72B, gpu=True).knobs(done) == []
    assert Adviser(QWEN_72B, gpu=True).words(done, 0) == ["a smaller model"]
