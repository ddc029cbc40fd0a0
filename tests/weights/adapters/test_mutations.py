"""Valid adapters, changed at random, give an error or the same result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig

from tasks.core.errors import PlumblineError
from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.live import live_model
from tasks.weights.adapters.values import require_values
from tests.weights.adapters.making import (
    Tensors,
    altered,
    base_model,
    opened,
    our_merge,
    save,
    train,
)


def _mutations(tensors: Tensors, data: st.DataObject) -> str:
    key = data.draw(st.sampled_from(sorted(tensors)))
    kind = data.draw(st.sampled_from(["drop", "shape", "transpose", "zero", "nan", "rename", "swap",
                                      "dtype", "again", "order", "empty"]))  # fmt: skip
    tensor = tensors[key]
    match kind:
        case "drop":
            del tensors[key]
        case "shape":
            tensors[key] = tensor[:-1]
        case "transpose":
            tensors[key] = tensor.transpose(0, -1)
        case "zero" if ".lora_magnitude" in key:  # of anything else it may be meant
            tensors[key] = torch.zeros_like(tensor)
        case "nan":
            tensors[key] = tensor * float("nan")
        case "rename":
            tensors[key.replace("self_attn", "attn").replace("mlp", "ffn")] = tensors.pop(key)
        case "swap":
            factor = data.draw(st.sampled_from(["lora_A", "lora_B"]))
            tensors[key.replace("lora_A", factor).replace("lora_B", factor)] = tensors.pop(key)
        case "dtype":
            tensors[key] = tensor.to(torch.int32)
        case "again":
            tensors[key.replace("base_model.model.", "")] = tensor.clone()
        case "empty":
            tensors[key] = torch.zeros(0)
        case "order":
            items = list(tensors.items())
            tensors.clear()
            tensors.update(reversed(items))
    return kind


RICH: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": ["q_proj", "down_proj"]}),
    "many things": (
        "qwen2",
        {
            "target_modules": ["q_proj", "up_proj"],
            "use_dora": True,
            "bias": "all",
            "modules_to_save": ["model.norm"],
            "trainable_token_indices": [3, 9],
        },
    ),
    "tied": ("qwen2", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "wte"], "lora_bias": False}),
    "experts": (
        "mixtral",
        {"target_modules": ["o_proj"], "target_parameters": ["gate_up_proj", "down_proj"]},
    ),
}


@pytest.mark.parametrize("case", RICH)
def test_an_error_or_the_same_result(case: str, tmp_path: Path) -> None:
    family, options = RICH[case]
    model = base_model(family)
    live = live_model(model)
    good = save(train(model, LoraConfig(r=4, **options)), tmp_path / "good")
    expected = our_merge(model, opened(good), live)

    @settings(deadline=None, max_examples=25)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        bad = altered(good, tmp_path / "bad", lambda tensors: _mutations(tensors, data))
        try:
            adapters = opened(bad)
            merged = our_merge(model, adapters, live)
            require_values([adapters[0][0]], changes(adapters, live).copies)
        except PlumblineError:
            return
        assert all(torch.equal(merged[name], expected[name]) for name in expected)

    check()
