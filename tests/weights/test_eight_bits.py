"""Weights in 8 bits: written as compressed-tensors reads them, read from fp8 bit for bit."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tasks.core.errors import ArtifactError, ContractError
from tasks.pipeline.artifact import Artifact
from tasks.serving.reference.load import load_model
from tasks.serving.reference.requests import ModelRef
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.model import model_facts
from tasks.weights.plan import Executed, Op, Plan
from tasks.weights.quantized.packed import decoded, read_base
from tasks.weights.quantized.quantize import (
    SCHEMES,
    left_alone,
    library_config,
    library_scheme,
    quantized_contract,
    quantized_plan,
)
from tasks.weights.write import write
from tests.weights.making import load, make_base, save_base, state_of
from tests.weights.packing import FP8, decode_all, same, scale_fp8

BOTH = tuple(SCHEMES)


def quantize(base: Path, out: Path, scheme: str, **options: Any) -> tuple[Plan, Executed]:
    """Plan, validate, execute, and write the files beside the weights."""
    facts = model_facts(base)
    weights = read_checkpoint(base)
    ops = tuple(
        Op(name, info.shape, info.dtype, f"model:{name}", info.dtype)
        for name, info in weights.items()
    )
    plan = quantized_plan(Plan(ops, max_shard_bytes=options.pop("limit", None)), facts, scheme)
    out.mkdir(exist_ok=True)
    done = write(plan, {"model": weights}, out, **options)
    for path in base.glob("*.json"):
        if "safetensors" not in path.name and path.name != "manifest.json":
            shutil.copy(path, out)
    config = json.loads((base / "config.json").read_text())
    config["quantization_config"] = library_config(scheme, left_alone(facts))
    (out / "config.json").write_text(json.dumps(config))
    return plan, done


@pytest.mark.parametrize("scheme", BOTH)
def test_every_weight_is_within_half_a_step_and_the_rest_is_untouched(
    llama: Artifact, tmp_path: Path, scheme: str
) -> None:
    from compressed_tensors.compressors.base import BaseCompressor

    plan, done = quantize(llama.path, tmp_path / "out", scheme, workers=1)
    contract = quantized_contract(model_facts(llama.path), scheme)
    wanted = {tensor.name: (tensor.shape, tensor.dtype) for tensor in contract}
    assert {op.name: (op.shape, op.dtype) for op in plan.ops} == wanted
    before, after = state_of(llama.path), state_of(tmp_path / "out")
    compressor = BaseCompressor.get_value_from_registry(SCHEMES[scheme].format)
    linear = {name for name in before if name.endswith("_proj.weight")}
    assert set(after) == {*before, *(f"{name}_scale" for name in linear)}
    for name in set(before) - linear:
        assert torch.equal(after[name], before[name])
    for name in linear:
        halves = {"weight": after[name], "weight_scale": after[f"{name}_scale"]}
        restored = compressor.decompress(halves, library_scheme(scheme))["weight"]
        error, scale = (restored - before[name].float()).abs(), halves["weight_scale"]
        if scheme == "w8a8":
            assert (error <= scale * 0.5 * (1 + 1e-5)).all()
        else:  # 3 mantissa bits: half a step is 1/16 of a number, or 2**-10 for the smallest ones
            step = torch.maximum(before[name].float().abs() / 16, scale * 2**-10)
            assert (error <= step * (1 + 1e-5)).all()

    model = load(tmp_path / "out")  # by transformers; config.json says what is not quantized
    for name, tensor in model.state_dict().items():
        if name in after:  # scales are held in bf16 here, and none of them is rounded by that
            assert torch.equal(tensor.float(), after[name].float()), name
    ids = torch.arange(40)[None]
    with torch.no_grad():
        wanted, logits = (m(ids).logits.float() for m in (load(llama.path), model))
    assert (wanted - logits).norm() / wanted.norm() < (0.05 if scheme == "w8a8" else 0.15)
    again = quantize(llama.path, tmp_path / "again", scheme, workers=3, limit=50_000)[1]
    assert done.checksums == again.checksums


def test_unsupported_layers_are_refused_by_name(llama: Artifact, tmp_path: Path) -> None:
    facts = model_facts(llama.path)
    with pytest.raises(ContractError, match="linear"):
        quantized_plan(Plan(()), replace(facts, quantized=()), "w8a8")
    name = facts.quantized[0]
    odd = Plan((Op(name, (4, 4), "I64", f"model:{name}", "I64"),))
    with pytest.raises(ContractError, match=name):
        quantized_plan(odd, facts, "w8a8")
    save_base(tmp_path, "mixtral", tied=False)
    with pytest.raises(ContractError, match=r"experts\.\w+"):
        quantized_plan(Plan(()), model_facts(tmp_path), "w8a8")


@pytest.fixture(scope="module", params=["qwen", "mixtral"])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp(request.param), request.param).path


@pytest.mark.parametrize("kind", FP8)
def test_each_number_times_its_scale(tmp_path: Path, plain: Path, kind: str) -> None:
    exact = scale_fp8(plain, tmp_path / "fp8", kind)
    decoded = decode_all(tmp_path / "fp8", tmp_path / "out")
    tensors = read_base(tmp_path / "fp8")
    assert any(info.dtype == "F32" for info in tensors.values())
    assert same(decoded, {k: v.to(decoded[k].dtype) for k, v in exact.items()}) == []
    model = load_model(ModelRef(tmp_path / "fp8")).state_dict()
    common = [key for key in exact if key in model]
    assert len(common) > 10
    assert same({k: model[k] for k in common}, {k: exact[k].bfloat16() for k in common}) == []


def test_all_codes_as_torch_reads_them(tmp_path: Path) -> None:
    codes = torch.arange(256, dtype=torch.uint8).reshape(16, 16).view(torch.float8_e4m3fn)
    powers = torch.full((1, 1), 2.0**-9).to(torch.float8_e8m0fnu)
    save_file({"w": codes, "w_scale_inv": powers}, tmp_path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensor = read_base(tmp_path)["w"]
    values = torch.from_numpy(decoded(tensor.packed, tensor.extents))
    assert torch.equal(values.nan_to_num(7), (codes.float() * 2.0**-9).nan_to_num(7))


def test_scales_that_do_not_fit(tmp_path: Path, qwen: Artifact) -> None:
    folder = tmp_path / "fp8"
    scale_fp8(qwen.path, folder, "deepseek")
    whole = state_of(folder)
    for path in folder.glob("model*"):
        path.unlink()
    key = next(key for key in whole if key.endswith("_scale_inv"))
    matrix = key.removesuffix("_scale_inv")
    for change in (
        {key: None}, {key: torch.ones(7, 7)}, {matrix: torch.ones(8, 8, dtype=torch.int8)}, {}
    ):  # fmt: skip
        tensors = {k: v for k, v in {**whole, **change}.items() if v is not None}
        save_file(tensors, folder / "model.safetensors")
        if not change:
            config = json.loads((folder / "config.json").read_text())
            del config["quantization_config"]
            (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(ArtifactError) as caught:
            read_base(folder)
        assert len(caught.value.details) == 1, change.keys()
