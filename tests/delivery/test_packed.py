"""A base stored in bitsandbytes' 4 bits, and such a SOURCE."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from tests.delivery.conftest import Done
from tests.weights.making import Spread, save_tokenizer, state_of, trained_model
from tests.weights.quantized.making import pack, same


def test_an_adapter_into_a_packed_base(tmp_path: Path, base: Path, deliver) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    packed = tmp_path / "packed"
    pack(base, packed)
    save_tokenizer(packed)
    trained_model(packed, Spread(), 3).save_pretrained(tmp_path / "adapter")
    done: Done = deliver(
        f"source={tmp_path / 'adapter'}", f"base={packed}", f"out={tmp_path / 'out'}"
    )
    assert done.code == 0, done.output
    model = AutoModelForCausalLM.from_pretrained(packed).dequantize().float()
    merged = PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload().state_dict()
    actual = state_of(tmp_path / "out")
    assert same(actual, {name: merged[name].to(torch.bfloat16) for name in actual}) == []
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_packed_model_is_decoded(tmp_path: Path, base: Path, deliver) -> None:
    packed = tmp_path / "packed"
    expected = pack(base, packed)
    save_tokenizer(packed)
    done: Done = deliver(f"source={packed}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    actual = state_of(tmp_path / "out")
    assert same(actual, {name: expected[name] for name in actual}) == []
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
