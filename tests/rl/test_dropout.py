"""Dropout is off in online updates, whose old log-probabilities are measured without it."""

from __future__ import annotations

import torch

from tasks.rl import setup


def test_dropout_is_switched_off() -> None:
    """`old` is measured without dropout, so a pass in training mode has to give the same."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

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
