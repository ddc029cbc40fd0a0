"""vLLM's base under QLoRA equals the weights that bitsandbytes multiplies with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tasks.rollout_base import write_rollout_base
from tasks.training.job import Peft
from tasks.weights.execute.worker import perform
from tests.tiny import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    path = tmp_path_factory.mktemp("plain")
    # Rows are whole blocks of 64: of others bitsandbytes' own kernel for CPUs takes wrong scales.
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(tiny("Qwen2", hidden_size=64, intermediate_size=128))
    model.to(torch.bfloat16).save_pretrained(path)
    return path


def made(folder: Path, base: Path, quantization: dict[str, Any]) -> Path:
    write_rollout_base(folder, base, quantization, dtype="bfloat16", perform=perform)
    return folder


@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("fp4", False)])
def test_values_equal_those_of_the_loaded_layers(
    base: Path, tmp_path: Path, kind: str, double: bool
) -> None:
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = Peft(kind="qlora", quant_type=kind, double_quant=double).quantization("bfloat16")
    assert quantization is not None
    folder = made(tmp_path, base, quantization)
    tensors = load_file(folder / "model.safetensors")
    how = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    loaded = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=how, dtype=torch.bfloat16, device_map={"": "cpu"}
    )
    packed = 0
    for name, parameter in loaded.named_parameters():
        state = getattr(parameter, "quant_state", None)
        value = parameter if state is None else dequantize_4bit(parameter.data, state)
        packed += state is not None
        assert torch.equal(tensors.pop(name), value), name
    assert packed == 14
    assert tensors == {}
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
