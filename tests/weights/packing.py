"""Make bases packed in 4 bits with transformers and bitsandbytes, and decode them with both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tasks.weights.plan import as_is
from tasks.weights.quantized.packed import read_base
from tasks.weights.write import write
from tests.weights.making import state_of

BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def pack(
    base: Path,
    out: Path,
    *,
    kind: str = "nf4",
    double: bool = True,
    storage: torch.dtype = torch.uint8,
    max_shard_size: str = "5GB",
) -> dict[str, torch.Tensor]:
    """Save a 4-bit model as transformers does; return the tensors that it dequantizes to."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=kind,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=storage,
    )
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.bfloat16, quantization_config=config
    )
    model.save_pretrained(out, max_shard_size=max_shard_size)
    return AutoModelForCausalLM.from_pretrained(out).dequantize().state_dict()


def decode_all(folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Decode the whole base: plan and execution."""
    sources = {"base": read_base(folder)}
    plan = as_is(sources["base"], "base")
    out.mkdir(parents=True)
    done = write(plan, sources, out)
    assert not any(each.nonfinite for each in done.tensors.values())
    return state_of(out)


def write_packed(folder: Path, tensors: Mapping[str, torch.Tensor], **options: Any) -> None:
    """Write matrices packed by bitsandbytes as its layers save them, and a config.json."""
    from bitsandbytes import functional

    files: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        packed, state = functional.quantize_4bit(tensor, **options)
        files[key] = packed
        files |= {f"{key}.{name}": side for name, side in state.as_dict(packed=True).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(files, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": BITSANDBYTES}))


def restored(folder: Path) -> dict[str, torch.Tensor]:
    """Return the matrices of such a folder, dequantized by bitsandbytes."""
    from bitsandbytes import functional

    files = load_file(folder / "model.safetensors")
    matrices = {}
    for key in [name for name in files if f"{name}.absmax" in files]:
        sides = {n.removeprefix(f"{key}."): t for n, t in files.items() if n.startswith(f"{key}.")}
        state = functional.QuantState.from_dict(sides, torch.device("cpu"))
        shape, state.shape = state.shape, torch.Size([prod(state.shape)])
        matrices[key] = functional.dequantize_4bit(files[key], state).reshape(shape)
    return matrices


def same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> list[str]:
    """Return keys whose tensors differ in dtype, shape or any bit, and keys that only one side has.

    The sign of zeros is ignored: FP4 has two zeros. bitsandbytes' AVX-512 kernel decodes both to
    0.0, its scalar one decodes one of them to -0.0.
    """
    bits: dict[str, list[Any]] = {}
    for name, tensor in [*left.items(), *right.items()]:
        positive = (tensor.reshape(-1) + 0).contiguous().view(torch.uint8)
        described = (tensor.dtype, tensor.shape, positive.numpy().tobytes())
        bits.setdefault(name, []).append(described)
    return [name for name, both in bits.items() if len(both) != 2 or both[0] != both[1]]


FP8 = {
    "deepseek": {"quant_method": "fp8", "weight_block_size": [48, 40]},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            }
        },
    },
}
"""`quantization_config` by tool; blocks that divide no matrix of the small models."""


def scale_fp8(base: Path, out: Path, kind: str) -> dict[str, torch.Tensor]:
    """Save a model in fp8 in two files; return the exact values of its tensors in fp64."""
    files: dict[str, torch.Tensor] = {}
    exact: dict[str, torch.Tensor] = {}
    for key, tensor in state_of(base).items():
        if not key.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            files[key], exact[key] = tensor, tensor.double()
            continue
        rows, columns = tensor.shape
        shares = {"deepseek": (48, 40), "modelopt": (rows, columns), "compressed": (1, columns)}
        high, wide = shares[kind]
        scale = torch.zeros(-(-rows // high), -(-columns // wide))
        for row in range(scale.shape[0]):
            for column in range(scale.shape[1]):
                block = tensor[row * high :, column * wide :][:high, :wide]
                scale[row, column] = block.float().abs().max() / 448
        scale = scale.to(torch.bfloat16 if kind == "compressed" else torch.float32)
        spread = scale.float().repeat_interleave(high, 0)[:rows]
        spread = spread.repeat_interleave(wide, 1)[:, :columns]
        files[key] = (tensor.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        exact[key] = files[key].double() * spread.double()
        name = f"{key}_scale_inv" if kind == "deepseek" else f"{key}_scale"
        files[name] = scale.reshape(()) if kind == "modelopt" else scale
        if kind == "modelopt":
            files[key.removesuffix("weight") + "input_scale"] = torch.tensor(0.5)
    shutil.copytree(base, out, ignore=lambda *_: ["model.safetensors", "manifest.json"])
    names = {key: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, key in enumerate(files)}
    for name in set(names.values()):
        save_file({k: v for k, v in files.items() if names[k] == name}, out / name)
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    config = json.loads((base / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": FP8[kind]}))
    return exact
