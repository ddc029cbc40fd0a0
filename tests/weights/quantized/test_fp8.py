"""Bases in fp8: decoded bit for bit, also for the reference; refused if scales do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.core.errors import ArtifactError
from tasks.serving.reference.load import load_model
from tasks.weights.quantized.decode import decoded_values
from tasks.weights.quantized.source import packing, read_base
from tests.weights.making import make_base, state_of
from tests.weights.quantized.making import FP8, decode_all, same, scale_fp8


@pytest.fixture(scope="module", params=["qwen", "mixtral"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp(request.param), request.param).path


@pytest.mark.parametrize(
    "kind",
    [
        kind
        if kind in ("deepseek", "compressed-channel", "modelopt")
        else pytest.param(kind, marks=pytest.mark.slow)
        for kind in FP8
    ],
)
def test_each_number_times_its_scale(tmp_path: Path, plain: Path, kind: str) -> None:
    exact = scale_fp8(plain, tmp_path / "fp8", kind)
    decoded = decode_all(tmp_path / "fp8", tmp_path / "out")
    tensors = read_base(tmp_path / "fp8").tensors
    assert any(info.dtype == "F32" for info in tensors.values())
    assert same(decoded, {k: v.to(decoded[k].dtype) for k, v in exact.items()}) == []
    model = load_model(tmp_path / "fp8").state_dict()
    common = [key for key in exact if key in model]
    assert len(common) > 10
    assert same({k: model[k] for k in common}, {k: exact[k].bfloat16() for k in common}) == []


def test_all_codes_as_torch_reads_them(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(torch.float8_e4m3fn)
    powers = torch.full((1, 1), 2.0**-9).to(torch.float8_e8m0fnu)
    save_file({"w": codes, "w_scale_inv": powers}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = read_base(tmp_path)
    stored = packing(source, "w")
    assert stored is not None
    values = torch.from_numpy(decoded_values(stored["stored"], source.extents("w")))
    assert torch.equal(values.nan_to_num(7), (codes.float() * 2.0**-9).nan_to_num(7))


@pytest.mark.parametrize("fault", ["no scale", "shape", "undeclared", "dtype"])
def test_scales_that_do_not_fit(tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "fp8"
    scale_fp8(make_base(tmp_path / "plain", "qwen").path, folder, "deepseek")
    tensors = state_of(folder)
    key = next(key for key in tensors if key.endswith("_scale_inv"))
    if fault == "no scale":
        del tensors[key]
    elif fault == "shape":
        tensors[key] = torch.ones(7, 7)
    elif fault == "dtype":
        tensors[key.removesuffix("_scale_inv")] = torch.ones(8, 8, dtype=torch.int8)
    else:
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
    for path in folder.glob("model*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ArtifactError) as caught:
        read_base(folder)
    assert len(caught.value.details) == 1
