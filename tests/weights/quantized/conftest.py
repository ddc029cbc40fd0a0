"""A base whose linear layers are `Conv1D`."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def conv1d(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 in bf16."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    sizes = {"vocab_size": 90, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    config = GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    folder = tmp_path_factory.mktemp("gpt2")
    model.save_pretrained(folder)
    return folder
