"""Adapters from transformers 4, where each expert was a linear layer of its own.

transformers 4 is not installed. To peft its models were trees of linear layers under the names of
the checkpoint. So the reference is such a tree of real modules, which peft itself wraps, trains,
saves and merges.
"""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tasks.core.errors import ContractError
from tasks.weights.families.merging import plan_merge
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.adapter_ops import operands
from tests.weights.adapters.making import quiet, save, train
from tests.weights.families.making import load, save_adapter, save_base
from tests.weights.families.test_families import merge
from tests.weights.making import state_of

MIXTRAL = ["w1", "w2", "w3"]
QWEN = ["gate_proj", "up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {"target_modules": [*MIXTRAL, "q_proj", "gate"]}),
    "mixtral, rslora": ("mixtral", {"target_modules": MIXTRAL, "use_rslora": True}),
    "mixtral, dora": ("mixtral", {"target_modules": ["w1", "v_proj"], "use_dora": True}),
    "mixtral, one expert": ("mixtral", {"target_modules": ["experts.3.w1", "1.w2"]}),
    "mixtral, a regex": ("mixtral", {"target_modules": r".*\.1\..*experts\.[02]\.w3"}),
    "mixtral, patterns": (
        "mixtral",
        {
            "target_modules": MIXTRAL,
            "rank_pattern": {"w2": 2, r".*experts\.1\.w3": 5},
            "alpha_pattern": {r"layers\.0\..*w1": 11},
            "layers_to_transform": [0],
        },
    ),
    "mixtral, saved": (
        "mixtral",
        {"target_modules": ["w1"], "modules_to_save": ["gate", "experts.2.w2", "lm_head"]},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {"target_modules": [*QWEN, "gate", "shared_expert_gate", "k_proj", "embed_tokens"]},
    ),
    "qwen3_moe": ("qwen3_moe", {"target_modules": [*QWEN, "o_proj"]}),
    "deepseek_v3": ("deepseek_v3", {"target_modules": [*QWEN, "kv_b_proj"]}),
    "gemma3, names of its checkpoint": ("gemma3", {"target_modules": ["q_proj", "fc1"]}),
    "qwen2_5_vl, names of its checkpoint": ("qwen2_5_vl", {"target_modules": ["q_proj", "qkv"]}),
}


class _Layer(nn.Module):
    """A module with tensors that are not matrices: a norm, a patch embedding."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, nn.Parameter(tensor))


def tree(state: dict[str, torch.Tensor]) -> nn.Module:
    """Make modules under the names of a checkpoint, a linear layer for each matrix."""
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
        at.add_module(last, _layer(name, tensors))
    return root


def _layer(name: str, tensors: dict[str, torch.Tensor]) -> nn.Module:
    weight = tensors.get("weight")
    if weight is None or weight.ndim != 2 or not set(tensors) <= {"weight", "bias"}:
        return _Layer(**tensors)
    if "embed" in name:
        return nn.Embedding.from_pretrained(weight)
    layer = nn.Linear(*reversed(weight.shape), bias="bias" in tensors)
    layer.load_state_dict(tensors)
    return layer


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    families = {family for family, _ in CASES.values()}
    return {family: save_base(folder / family, family, tied=False) for family in families}


def train_older(base: Path, folder: Path, settings: dict[str, Any]) -> nn.Module:
    """Train and save an adapter of the older model. Return that model."""
    from peft import LoraConfig

    model = tree(state_of(base))
    save(train(model, LoraConfig(r=3, lora_alpha=5, **settings)), folder)
    return model


def merged_older(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    from peft import PeftModel

    with quiet():
        wrapped = PeftModel.from_pretrained(copy.deepcopy(model), folder)
        merged = wrapped.merge_and_unload()
    return {name: tensor.to(torch.bfloat16) for name, tensor in merged.state_dict().items()}


@pytest.mark.parametrize("case", CASES)
def test_each_expert_is_a_layer_of_its_own(case: str, bases, tmp_path: Path) -> None:
    family, settings = CASES[case]
    base = bases[family]
    model = train_older(base, tmp_path / "adapter", settings)
    merge(base, tmp_path / "adapter", tmp_path / "out")
    ours, theirs = state_of(tmp_path / "out"), merged_older(model, tmp_path / "adapter")
    assert list(ours) == list(state_of(base))
    assert set(ours) == set(theirs)
    assert not [key for key, tensor in theirs.items() if not torch.equal(ours[key], tensor)]
    assert any(not torch.equal(tensor, ours[key]) for key, tensor in state_of(base).items())
    load(tmp_path / "out")


@pytest.mark.parametrize("rslora", [False, True])
def test_peft_loads_the_same_adapter_into_the_fused_model(rslora: bool, bases, tmp_path) -> None:
    """peft 0.21 gives the same model, except that rsLoRA's scale is multiplied by sqrt(2)."""
    from peft import PeftModel

    base = bases["mixtral"]
    train_older(base, tmp_path / "adapter", {"target_modules": MIXTRAL, "use_rslora": rslora})
    merge(base, tmp_path / "adapter", tmp_path / "out")
    with quiet():
        wrapped = PeftModel.from_pretrained(load(base, torch.float32), tmp_path / "adapter")
        wrapped.merge_and_unload().save_pretrained(tmp_path / "peft")
    ours, theirs, was = (state_of(folder) for folder in (tmp_path / "out", tmp_path / "peft", base))
    assert set(was) == set(ours) == set(theirs)
    assert any(not torch.equal(ours[key], tensor) for key, tensor in was.items())
    for key, tensor in was.items():
        factor = 2**0.5 if rslora and ("w1" in key or "w3" in key) else 1.0
        change = (ours[key].float() - tensor.float()) * factor
        # Ours is rounded to bf16: by 2**-8 of an element at most.
        error = (theirs[key].float() - tensor.float() - change).abs()
        assert bool((error <= factor * ours[key].float().abs() * 2**-8 + 1e-6).all()), key


def test_fused_and_single_experts_add_up(bases, tmp_path: Path) -> None:
    """Merge an adapter of the fused stack together with one of single experts."""
    from tasks.weights.adapters.changes import changes
    from tasks.weights.adapters.read import read_adapter
    from tasks.weights.plan.contracts import model_facts

    base = bases["mixtral"]
    train_older(base, tmp_path / "old", {"target_modules": ["w1"]})
    save_adapter(tmp_path / "new", base, "mixtral")
    facts = model_facts(base)
    both = [(read_adapter(tmp_path / name, name), 1.0) for name in ("new", "old")]
    infos = {
        f"{adapter.name}:{k}": v for adapter, _ in both for k, v in adapter.tensors.tensors.items()
    }
    weights = read_checkpoint(base)
    plan = plan_merge(weights.tensors, facts, changes(both, facts.live), infos)
    terms = {op.name: [operands(term)[0].partition(":")[0] for term in op.terms] for op in plan.ops}
    experts = "model.layers.1.block_sparse_moe.experts.2"
    assert terms[f"{experts}.w1.weight"] == ["new", "old"]
    assert terms[f"{experts}.w2.weight"] == ["new"]
    train_older(base, tmp_path / "dora", {"target_modules": ["w1"], "use_dora": True})
    both[1] = (read_adapter(tmp_path / "dora", "dora"), 1.0)
    infos |= {f"dora:{key}": info for key, info in both[1][0].tensors.tensors.items()}
    weights = read_checkpoint(base)
    with pytest.raises(ContractError, match="normalised by one"):
        plan_merge(weights.tensors, facts, changes(both, facts.live), infos)


def test_a_missing_expert_is_named(bases, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    train_older(bases["mixtral"], folder, {"target_modules": MIXTRAL})
    state = state_of(folder, "adapter_model")
    key = next(key for key in state if "layers.1" in key and "experts.2.w3.lora_B" in key)
    del state[key]
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ContractError) as raised:
        merge(bases["mixtral"], folder, tmp_path / "out")
    assert f"{key}: missing" in raised.value.details
    assert "covers only 47 of the 48" in raised.value.message


def test_a_base_fused_on_disk_is_refused_with_a_hint(bases, tmp_path: Path) -> None:
    shutil.copytree(bases["mixtral"], tmp_path / "fused")
    state = {
        key: tensor.contiguous() for key, tensor in load(bases["mixtral"]).state_dict().items()
    }
    save_file(state, tmp_path / "fused" / "model.safetensors", metadata={"format": "pt"})
    train_older(bases["mixtral"], tmp_path / "adapter", {"target_modules": MIXTRAL})
    with pytest.raises(ContractError) as raised:
        merge(tmp_path / "fused", tmp_path / "adapter", tmp_path / "out")
    assert len(raised.value.details) == 4  # of 48 tensors the first three
    assert "use a base that stores them separately" in raised.value.report()
