"""A base stored in bitsandbytes' 4 bits or in fp8, and such a SOURCE."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.audit.making import codes
from tests.delivery.conftest import Done
from tests.weights.making import (
    Spread,
    make_base,
    save_tokenizer,
    state_of,
    trained_model,
)
from tests.weights.quantized.making import pack, same, scale_fp8


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


EXPERTS = Spread(parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])


@pytest.mark.parametrize(
    ("family", "spread"),
    [pytest.param("qwen", Spread(), marks=pytest.mark.slow), ("mixtral", EXPERTS)],
)
def test_an_adapter_into_a_base_in_fp8(tmp_path: Path, here, family: str, spread: Spread) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    fp8, adapter, decoded = tmp_path / "fp8", tmp_path / "adapter", tmp_path / "decoded"
    base = make_base(tmp_path / "plain", family).path
    exact = scale_fp8(base, fp8, "deepseek")
    trained_model(fp8, spread, 3).save_pretrained(adapter)
    assert "BASE_QUANTISED" not in codes(adapter, base=fp8)
    done: Done = here(f"source={adapter}", f"base={fp8}", f"out={tmp_path / 'out'}")
    assert done.code == 0, done.output
    decoded.mkdir()
    shutil.copy(base / "config.json", decoded)
    save_file({k: v.float() for k, v in exact.items()}, decoded / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(decoded, dtype=torch.float32)
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(tmp_path / "peft")
    merged, actual = state_of(tmp_path / "peft"), state_of(tmp_path / "out")
    assert same(actual, {name: merged[name].to(torch.bfloat16) for name in actual}) == []
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


HOW = [
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "auto"),
    ({"quant_method": "gptq", "bits": 4}, "original"),
    ({"quant_method": "mxfp4"}, "dequantized"),
]


@pytest.mark.parametrize(("how", "mode"), HOW)
def test_what_cannot_be_decoded(
    tmp_path: Path, base: Path, adapter: Path, here, how: dict[str, object], mode: str
) -> None:
    folder = tmp_path / "quantised"
    shutil.copytree(base, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": how}))
    (folder / "README.md").write_text("---\nbase_model:\n- some/original\n---\n")
    assert codes(adapter, base=folder)["BASE_QUANTISED"] == "error"
    done: Done = here(
        f"source={adapter}", f"base={folder}", f"out={tmp_path / 'out'}", f"merge.base={mode}"
    )
    assert done.code == 2
    assert "merge.base=dequantized" not in done.output


def test_fp8_does_not_go_through_4_bits(tmp_path: Path, base: Path, adapter: Path, here) -> None:
    scale_fp8(base, tmp_path / "fp8", "static")
    arguments = [f"source={adapter}", f"base={tmp_path / 'fp8'}", f"out={tmp_path / 'out'}"]
    done: Done = here(*arguments, "merge.base=dequantized", "check_base=false")
    assert done.code == 2
    assert not (tmp_path / "out").exists()
