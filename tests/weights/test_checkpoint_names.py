"""Adapters on the layers of the checkpoint, which transformers 5 fuses in memory or on disk.

transformers 4 is not installed. To peft its models were trees of linear layers under the names of
the checkpoint. So the reference is such a tree of real modules, which peft itself wraps, trains,
saves and merges.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tasks.core.errors import ContractError
from tests.tiny import FAMILIES, Family
from tests.tiny import FAMILY_SIZES as SIZES
from tests.weights.making import (
    load,
    merge,
    merged_by_peft,
    rounded_alike,
    save,
    save_adapter,
    save_base,
    state_of,
    train,
)

MIXTRAL, QWEN = ["w1", "w2", "w3"], ["gate_proj", "up_proj", "down_proj"]
PATTERNS = {
    "rank_pattern": {"w2": 2, r".*experts\.1\.w3": 5},
    "alpha_pattern": {r"layers\.0\..*w1": 11},
    "layers_to_transform": [0],
}
FUSED_DORA = ["shared_experts.gate_proj", "experts.1.w1", "k_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"target_modules": [*MIXTRAL, "q_proj", "gate"], "use_rslora": True}),
    "mixtral, patterns": ("mixtral", {"target_modules": MIXTRAL, **PATTERNS}),
    "mixtral, saved": (
        "mixtral",
        {"target_modules": ["w1"], "modules_to_save": ["gate", "experts.2.w2", "lm_head"]},
    ),
    "minimax_m3": ("minimax_m3", {"target_modules": FUSED_DORA, "use_dora": True}),
}


def _minimax_m3(**changes: Any) -> Any:
    from transformers import MiniMaxM3VLConfig

    vision = {
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    text = {
        **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
        "shared_intermediate_size": 24, "rotary_dim": 8,
    }  # fmt: skip
    return MiniMaxM3VLConfig(text_config=text, vision_config=vision, **changes)


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniMax-M3 fuses gate and up of a dense layer in memory."""
    monkeypatch.setitem(FAMILIES, "minimax_m3", Family(_minimax_m3))


def _module(name: str, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Make a linear layer of a matrix, an embedding, or a module that only has the tensors."""
    weight = tensors.get("weight")
    if weight is None or weight.ndim != 2 or not set(tensors) <= {"weight", "bias"}:
        other = nn.Module()
        for leaf, tensor in tensors.items():
            other.register_parameter(leaf, nn.Parameter(tensor))
        return other
    if "embed" in name:
        return nn.Embedding.from_pretrained(weight)
    layer = nn.Linear(*reversed(weight.shape), bias="bias" in tensors)
    layer.load_state_dict(tensors)
    return layer


def _tree(state: dict[str, torch.Tensor]) -> nn.Module:
    """Make modules under the names of a checkpoint."""
    root = nn.Module()
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        module, _, leaf = key.rpartition(".")
        modules.setdefault(module, {})[leaf] = tensor.float()
    for name, tensors in sorted(modules.items(), key=lambda item: item[0].count(".")):
        *parents, last = name.split(".")
        at = root
        for parent in parents:
            if not hasattr(at, parent):
                at.add_module(parent, nn.Module())
            at = getattr(at, parent)
        at.add_module(last, _module(name, tensors))
    return root


def _train(base: Path, folder: Path, **settings: Any) -> nn.Module:
    """Train and save an adapter of the tree of a base. Return that tree."""
    from peft import LoraConfig

    model = _tree(state_of(base))
    save(train(model, LoraConfig(r=3, lora_alpha=5, **settings)), folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_each_layer_of_the_checkpoint_is_merged_as_peft_does(case: str, tmp_path: Path) -> None:
    family, settings = CASES[case]
    base = save_base(tmp_path / "base", family, tied=False)
    model = _train(base, tmp_path / "adapter", **settings)
    merge(base, tmp_path / "adapter", tmp_path / "out")
    ours = state_of(tmp_path / "out")
    theirs = merged_by_peft(model, tmp_path / "adapter").state_dict()
    assert list(ours) == list(state_of(base))
    assert set(ours) == set(theirs)
    assert not [key for key, tensor in theirs.items() if not rounded_alike(ours[key], tensor)]
    assert any(not torch.equal(tensor, ours[key]) for key, tensor in state_of(base).items())
    load(tmp_path / "out")


@pytest.mark.parametrize("dora", [False, True])
def test_a_pair_on_a_layer_fused_in_memory_is_cut_into_rows(dora: bool, tmp_path: Path) -> None:
    """Includes DoRA, whose norms are those of single rows."""
    base = save_base(tmp_path / "base", "minimax_m3", tied=False)
    targets = {"target_modules": ["gate_up_proj", "down_proj", "q_proj"], "use_dora": dora}
    adapter = save_adapter(tmp_path / "adapter", base, "minimax_m3", **targets)
    plan, _ = merge(base, adapter, tmp_path / "out")
    merged_by_peft(base, adapter).save_pretrained(tmp_path / "peft")
    ours, theirs = state_of(tmp_path / "out"), state_of(tmp_path / "peft")
    assert set(ours) == set(theirs)
    assert not [key for key, tensor in theirs.items() if not rounded_alike(ours[key], tensor)]
    shared = "language_model.model.layers.1.block_sparse_moe.shared_experts"
    (term,) = next(op for op in plan.ops if op.name == f"{shared}.up_proj.weight").terms
    assert (bool(term.magnitude), term.out_start) == (dora, 24)


def _findings(base: Path, adapter: Path, out: Path) -> list[str]:
    with pytest.raises(ContractError) as raised:
        merge(base, adapter, out)
    return list(raised.value.details)


def test_layers_that_cannot_be_merged_are_refused_by_name(tmp_path: Path) -> None:
    vision = save_base(tmp_path / "vl", "qwen2_5_vl", tied=False)
    targets = r".*(patch_embed\.proj|q_proj)"
    adapter = save_adapter(tmp_path / "b", vision, "qwen2_5_vl", target_modules=targets)
    findings = _findings(vision, adapter, tmp_path / "out")
    assert any("visual.patch_embed.proj: " in line for line in findings)

    mixtral = save_base(tmp_path / "mixtral", "mixtral", tied=False)
    _train(mixtral, tmp_path / "c", target_modules=MIXTRAL)
    shutil.copytree(mixtral, tmp_path / "fused")
    stacks = {key: tensor.contiguous() for key, tensor in load(mixtral).state_dict().items()}
    save_file(stacks, tmp_path / "fused" / "model.safetensors", metadata={"format": "pt"})
    assert len(_findings(tmp_path / "fused", tmp_path / "c", tmp_path / "out")) == 4

    state = state_of(tmp_path / "c", "adapter_model")
    key = next(key for key in state if "layers.1" in key and "experts.2.w3.lora_B" in key)
    del state[key]
    save_file(state, tmp_path / "c" / "adapter_model.safetensors", metadata={"format": "pt"})
    findings = _findings(mixtral, tmp_path / "c", tmp_path / "out")
    assert any(f"{key}: missing" in finding for finding in findings)
