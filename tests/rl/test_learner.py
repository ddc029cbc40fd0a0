"""Optimizer steps of the online update: a gradient that is not finite moves no weight."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from tasks.rl import setup
from tests.commands import run_ranks


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_ends_every_rank_before_a_weight_moves(
    tmp_path: Path,
) -> None:
    """With fp32 weights below ZeRO-3, DeepSpeed itself would take the step."""
    run_ranks("tests.rl.learner_program", str(tmp_path), log_path=tmp_path / "log")
    cases = itertools.product(("bfloat16", "float32"), range(4))
    expected = [f"{dtype} {stage}: False step 2" for dtype, stage in cases]
    for rank in range(2):
        lines = (tmp_path / str(rank)).read_text().splitlines()
        assert [line.rpartition(": the test's")[0] for line in lines] == expected


def test_dropout_is_switched_off() -> None:
    """`old` is measured without dropout, so a pass in training mode has to give the same."""
    config = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=32, attention_dropout=0.5,
    )  # fmt: skip
    lora = LoraConfig(target_modules=["q_proj"], lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config), lora)
    ids = torch.arange(8)[None]

    def differs() -> bool:
        measured, trained = model.eval()(ids).logits, model.train()(ids).logits
        return not torch.equal(measured, trained)

    assert differs()
    assert setup.disable_dropout(model)
    assert not differs()
    assert not setup.disable_dropout(model)
