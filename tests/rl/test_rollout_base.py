"""The base that vLLM samples from under QLoRA is the one that bitsandbytes multiplies with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tasks.errors import ArtifactError
from tasks.rl.rollout_base import rollout_base
from tasks.training.job import Peft
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


@pytest.mark.parametrize(("kind", "double"), [("nf4", True), ("fp4", False)])
def test_values_are_those_of_the_loaded_layers(
    base: Path, tmp_path: Path, kind: str, double: bool
) -> None:
    from bitsandbytes.functional import dequantize_4bit
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    quantization = Peft(kind="qlora", quant_type=kind, double_quant=double).quantization()
    assert quantization is not None
    folder = rollout_base(tmp_path, base, quantization, digest="d")
    found = load_file(folder / "model.safetensors")
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
        assert torch.equal(found.pop(name), value), name
    assert packed == 14
    assert found == {}
    config = json.loads((folder / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}


def test_it_is_made_once_for_a_base_and_a_way_to_quantise(base: Path, tmp_path: Path) -> None:
    nf4 = Peft(kind="qlora").quantization()
    fp4 = Peft(kind="qlora", quant_type="fp4").quantization()
    assert nf4 is not None
    assert fp4 is not None
    first = rollout_base(tmp_path, base, nf4, digest="a")
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    half = first.with_suffix(".part")
    half.mkdir()  # of a run that was killed
    assert rollout_base(tmp_path, base, nf4, digest="a") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp
    assert rollout_base(tmp_path, base, fp4, digest="a") != first
    assert rollout_base(tmp_path, base, nf4, digest="b") != first
    with pytest.raises(ArtifactError, match="int8"):
        rollout_base(tmp_path, base, {**nf4, "type": "int8"}, digest="a")
