"""Faults planted in a merged file are found at every size of adapter; right merges are proven."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.core.contract import Check
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.model import perform
from tasks.weights.proof import Proof, State, planned, prove_merge
from tasks.weights.quantized.nf4 import as_trained
from tasks.weights.quantized.packed import open_model
from tasks.weights.write import write
from tests.tiny import FAMILIES, random_model
from tests.weights.making import NF4, failed, load, merged, merged_by_peft, save, state_of, train
from tests.weights.making import planned as planned_by_us

NAME = "model.layers.1.self_attn.v_proj.weight"
SIZES = (1.0, 2.0**-10)


def _merged(out: Path, adapter: Path, base: Path, trained: Path, spoil=None) -> Check:
    """Merge and return the check; `spoil` may change the written files before they are checked."""

    def working(function: Callable, *arguments: object) -> object:
        result = perform(function, *arguments)
        if function is write and spoil is not None:
            spoil(out)
        return result

    out.mkdir()
    report = merged(out, adapter, base, trained, rounding="unbiased", perform=working)
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


def _write(folder: Path, tensor: torch.Tensor) -> None:
    """Replace the tensor `NAME`, in whichever file it is."""
    for path in folder.glob("model*.safetensors"):
        tensors = load_file(path)
        if NAME in tensors:
            assert not torch.equal(tensors[NAME], tensor)
            path.unlink()  # it may be a link to the base's
            save_file({**tensors, NAME: tensor}, path, metadata={"format": "pt"})
            return
    raise AssertionError(NAME)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("fault", ["none", "left out", "scale", "other base"])
def test_faults_of_a_qlora_merge(fault, size, qwen, qlora_adapter, qlora_run, tmp_path) -> None:
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


O_PROJ, Q_PROJ = (f"model.layers.1.self_attn.{name}_proj.weight" for name in "oq")
EXPERTS = {"target_modules": ["q_proj"], "target_parameters": list(FAMILIES["mixtral"].experts)}
RIGHT: list[tuple[str, Mapping[str, Any]]] = [
    ("qwen2", {"use_rslora": True, "rank_pattern": {"q_proj": 2}}),
    ("qwen2", {"use_dora": True}),
    ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    ("llama", {"target_modules": ["embed_tokens", "lm_head", "k_proj"]}),
    ("gpt2", {}),
    ("mixtral", EXPERTS),
]


def made(
    folder: Path, family: str, settings: Mapping[str, Any], *, hidden: int = 64
) -> tuple[Path, Path]:
    """Save a base and an adapter."""
    from peft import LoraConfig

    base, tied = folder / "base", {"tie_word_embeddings": family == "qwen2"}
    config = FAMILIES[family].config(hidden_size=hidden, num_hidden_layers=3, **tied)
    random_model(config).save_pretrained(base)
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **settings}
    wrapped = train(load(base), LoraConfig(task_type="CAUSAL_LM", **options))
    return base, save(wrapped, folder / "adapter")


def prove(base: Path, adapter: Path, folder: Path) -> Proof:
    plan = planned(base, adapter)
    return prove_merge(plan.plan, plan.sources, open_model(folder), tied=plan.tied)


@pytest.mark.parametrize(("family", "settings"), RIGHT)
def test_a_right_merge_is_proven_in_every_arithmetic(tmp_path, family, settings) -> None:
    base, adapter = made(tmp_path, family, settings)
    for arithmetic, stored in (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32",) * 2):
        folder = tmp_path / arithmetic
        model = load(base, getattr(torch, arithmetic))
        merged_by_peft(model, adapter, dtype=getattr(torch, stored)).save_pretrained(folder)
        proof = prove(base, adapter, folder)
        assert proof.ok, (arithmetic, stored, proof.faults, proof.scale)
        assert any(verdict.touched for verdict in proof.verdicts)
        assert abs(proof.scale - 1) < 1e-3


FACTORS = [(1.0, State.RIGHT), (0.0, State.WRONG), (2.0, State.WRONG)]


@pytest.mark.parametrize(("factor", "state"), FACTORS)
def test_a_light_adapter_in_a_dequantised_base(tmp_path, factor, state) -> None:
    """A merge to nearest, as peft's, is right although rounding throws most of it away."""
    base, adapter = made(tmp_path, "llama", {"target_modules": ["q_proj"]}, hidden=512)
    tensors = load_file(base / "model.safetensors")
    key = "model.layers.1.self_attn.q_proj.weight"
    weak, path = {}, adapter / "adapter_model.safetensors"
    for name, tensor in load_file(path).items():
        weak[name] = tensor / 1000 if "lora_B" in name else tensor
    save_file(weak, path, metadata={"format": "pt"})
    for target in [name for name in tensors if name.endswith("q_proj.weight")]:
        module = f"base_model.model.{target.removesuffix('.weight')}"
        a, b = (weak[f"{module}.lora_{half}.weight"] for half in "AB")
        seen, change = as_trained(tensors[target].bfloat16(), NF4).float(), 6 / 4 * b @ a
        times = factor if target == key else 1.0
        tensors[target] = (seen + times * change).bfloat16()
    (tmp_path / "out").mkdir()
    save_file(tensors, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(base / "config.json", tmp_path / "out")
    proof = prove(base, adapter, tmp_path / "out")
    states = {verdict.name: verdict.state for verdict in proof.verdicts if verdict.touched}
    assert states.pop(key) is state
    assert set(states.values()) == {State.RIGHT}


def test_a_single_wrong_number_and_a_missing_tensor_are_found(tmp_path: Path) -> None:
    base, adapter = made(tmp_path, "qwen2", {})
    merged_by_peft(base, adapter).save_pretrained(tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    tensors[O_PROJ][5, 7] += 0.01 + tensors[O_PROJ][5, 7].abs() / 8
    tensors["model.norm.weight"][3] *= 1.01
    tensors["v_head.weight"] = tensors.pop(Q_PROJ)
    save_file(tensors, path, metadata={"format": "pt"})
    proof = prove(base, adapter, tmp_path / "out")
    changed = {O_PROJ: State.WRONG, "model.norm.weight": State.WRONG}
    states = {verdict.name: verdict.state for verdict in proof.faults}
    assert states == {**changed, Q_PROJ: State.MISSING}
    assert [fault.sums.beyond for fault in proof.faults if fault.name in changed] == [1, 1]
    assert [fault.touched for fault in proof.faults if fault.name in changed] == [True, False]


def test_a_merge_of_ours_is_proven_by_its_plan(qwen, qlora_adapter, qlora_run, tmp_path) -> None:
    for mode in ("dequantized", "original"):
        (out := tmp_path / mode).mkdir()
        merged(out, qlora_adapter, qwen.path, qlora_run, base_mode=mode)
        through = {**NF4, "loaded_dtype": "bfloat16", "base": mode}
        plan = planned_by_us(qlora_adapter, qwen.path, quantization=through)
        proof = prove_merge(plan.plan, plan.sources, read_checkpoint(out))
        assert proof.ok, proof.faults
        count = sum(verdict.dequantized for verdict in proof.verdicts)
        assert count == (14 if mode == "dequantized" else 0)
