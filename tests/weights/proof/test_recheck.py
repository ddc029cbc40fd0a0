"""Faults planted in the merged file are found at every size of adapter, and named."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.contract import Check
from tasks.drift.fingerprint import PROFILES
from tasks.merge import merge
from tasks.weights.execute.worker import perform
from tasks.weights.quantized.nf4 import as_trained
from tests.weights.making import NF4, copy_reference, failed, state_of

NAME = "model.layers.1.self_attn.v_proj.weight"
SIZES = (1.0, pytest.param(2.0**-6, marks=pytest.mark.slow), 2.0**-10)


def _merged(out: Path, adapter: Path, base: Path, trained: Path, spoil=None) -> Check:
    """Merge and return the check; `spoil` may change the written files before they are checked."""

    def working(request: dict) -> dict:
        reply = perform(request)
        if request["do"] == "execute" and spoil is not None:
            spoil(Path(request["out"]))
        return reply

    out.mkdir()
    report = merge(
        out, adapter=adapter, base=base, trained=trained, base_mode="auto", score=copy_reference,
        profile=PROFILES["standard"], log=logging.getLogger("tests.weights"), perform=working,
    )  # fmt: skip
    (check,) = [check for check in report.checks if check.name == "sampled rows"]
    assert check.ok or failed(report.checks) == ["sampled rows"]
    return check


def _of_size(adapter: Path, size: float, folder: Path) -> tuple[Path, torch.Tensor]:
    """Return the adapter with B times `size`, and its change of the tensor `NAME`, in fp64."""
    weak = shutil.copytree(adapter, folder)
    path = weak / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors = {k: v * size if "lora_B" in k else v for k, v in tensors.items()}
    save_file(tensors, path)
    key = f"base_model.model.{NAME.removesuffix('.weight')}"
    config = json.loads((weak / "adapter_config.json").read_text())
    a, b = (tensors[f"{key}.lora_{half}.weight"].double() for half in "AB")
    return weak, config["lora_alpha"] / config["r"] * (b @ a)


def _write(folder: Path, tensor: torch.Tensor, name: str = NAME) -> None:
    """Replace a tensor, in whichever file it is."""
    for path in folder.glob("model*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            assert not torch.equal(tensors[name], tensor)
            path.unlink()  # it may be a link to the base's
            save_file({**tensors, name: tensor}, path, metadata={"format": "pt"})
            return
    raise AssertionError(name)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", ["none", "left out", "scale", "other base"])
def test_faults_of_a_qlora_merge(
    fault: str, size: float, qwen, qlora_adapter, qlora_run, tmp_path
) -> None:
    adapter, change = _of_size(qlora_adapter, size, tmp_path / "adapter")
    base = state_of(qwen.path)[NAME]
    seen = as_trained(base, NF4)
    tensor = {
        "none": None,
        "left out": seen,
        "scale": (seen.double() + 1.02 * change).to(base.dtype),
        "other base": (base.double() + change).to(base.dtype),
    }[fault]
    spoil = None if tensor is None else lambda out: _write(out, tensor)
    check = _merged(tmp_path / "out", adapter, qwen.path, qlora_run, spoil)
    assert check.ok == (fault == "none")
    assert check.ok or check.found.startswith(f"1 of 26 tensors are not: {NAME} (")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("factor", [0.0, 0.98, 1.0, 1.02, 2.0])
def test_faults_of_a_lora_merge(
    factor: float, size: float, llama, lora_adapter, lora_run, tmp_path
) -> None:
    adapter, change = _of_size(lora_adapter, size, tmp_path / "adapter")
    base = state_of(llama.path)[NAME]
    tensor = (base.double() + factor * change).to(base.dtype)
    spoil = None if factor == 1.0 else lambda out: _write(out, tensor)
    check = _merged(tmp_path / "out", adapter, llama.path, lora_run, spoil)
    assert check.ok == (factor == 1.0)
    assert check.ok or NAME in check.found


def test_one_element_of_an_untouched_tensor(llama, lora_adapter, lora_run, tmp_path) -> None:
    norm = "model.norm.weight"
    tensor = state_of(llama.path)[norm].clone()
    tensor[3] *= 1.01
    check = _merged(
        tmp_path / "out", lora_adapter, llama.path, lora_run, lambda out: _write(out, tensor, norm)
    )
    assert check.found.endswith(f"tensors are not: {norm} (1 of 64)")
