"""Layers that are fused only in memory, or only on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import ContractError
from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.read import read_adapter
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.adapter_ops import Dora
from tasks.weights.plan.contracts import model_facts
from tests.weights.families.making import (
    FAMILIES,
    SIZES,
    Family,
    load,
    merged_by_peft,
    save_adapter,
    save_base,
)
from tests.weights.families.test_families import merge
from tests.weights.families.test_legacy_names import merged_older, train_older
from tests.weights.making import state_of


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


def _hrm(**changes: Any) -> Any:
    from transformers import HrmTextConfig

    return HrmTextConfig(**{**SIZES, "head_dim": 8, "num_layers_per_stack": 1, **changes})


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniMax-M3 fuses gate and up of a dense layer in memory, HRM fuses them on disk."""
    monkeypatch.setitem(FAMILIES, "minimax_m3", Family(_minimax_m3))
    monkeypatch.setitem(FAMILIES, "hrm", Family(_hrm))


@pytest.mark.parametrize("dora", [False, True])
def test_a_pair_on_the_fused_layer_is_cut_into_the_rows_of_each(dora: bool, tmp_path: Path) -> None:
    """Includes DoRA, whose norms are those of single rows."""
    base = save_base(tmp_path / "base", "minimax_m3", tied=False)
    adapter = save_adapter(
        tmp_path / "adapter", base, "minimax_m3",
        target_modules=["gate_up_proj", "down_proj", "q_proj"], use_dora=dora,
    )  # fmt: skip
    plan = merge(base, adapter, tmp_path / "out")
    merged_by_peft(base, adapter).save_pretrained(tmp_path / "peft")
    ours, theirs = state_of(tmp_path / "out"), state_of(tmp_path / "peft")
    assert set(ours) == set(theirs)
    assert not [key for key, tensor in theirs.items() if not torch.equal(ours[key], tensor)]
    shared = "language_model.model.layers.1.block_sparse_moe.shared_experts"
    (term,) = next(op for op in plan.ops if op.name == f"{shared}.up_proj.weight").terms
    assert (isinstance(term, Dora), getattr(term, "out_start", None)) == (dora, 24)
    load(tmp_path / "out")


OLDER = {
    "minimax_m3": ["shared_experts.gate_proj", "experts.1.w1", "k_proj"],
    "hrm": ["gqkv_proj", "gate_up_proj", "down_proj"],
}


@pytest.mark.parametrize("family", OLDER)
def test_pairs_on_the_layers_of_the_checkpoint(family: str, tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", family, tied=False)
    folder = tmp_path / "adapter"
    model = train_older(base, folder, {"target_modules": OLDER[family], "use_dora": True})
    merge(base, folder, tmp_path / "out")
    ours, theirs = state_of(tmp_path / "out"), merged_older(model, folder)
    assert set(ours) == set(theirs)
    assert not [key for key, tensor in theirs.items() if not torch.equal(ours[key], tensor)]
    load(tmp_path / "out")


def test_layers_fused_on_disk_are_refused_by_name(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "hrm", tied=False)
    adapter = save_adapter(tmp_path / "adapter", base, "hrm", target_modules=["q_proj", "o_proj"])
    with pytest.raises(ContractError) as raised:
        merge(base, adapter, tmp_path / "out")
    assert len(raised.value.details) == 2
    assert all("q_proj" in finding and "gqkv_proj" in finding for finding in raised.value.details)
    assert "peft's merge_and_unload" in raised.value.message


def test_four_bits_of_layers_fused_on_disk_are_refused(tmp_path: Path) -> None:
    """Training quantised the layers one by one; the fused tensor would give other values."""
    base = save_base(tmp_path / "base", "hrm", tied=False)
    train_older(base, tmp_path / "adapter", {"target_modules": ["down_proj"]})
    facts, lora = model_facts(base), read_adapter(tmp_path / "adapter")
    operands = {f"adapter:{key}": info for key, info in lora.tensors.tensors.items()}
    four = {"type": "nf4", "base": "dequantized"}
    settings = MergeSettings(quantization=four, quantized=frozenset(facts.quantized))
    total = changes([(lora, 1.0)], facts.live)
    weights = read_checkpoint(base)
    with pytest.raises(ContractError) as raised:
        plan_merge(weights.tensors, facts, total, operands, settings)
    assert raised.value.details
    assert all("fuses layers that training quantised" in x for x in raised.value.details)


def test_a_convolution_is_refused_by_name(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "qwen2_5_vl", tied=False)
    adapter = save_adapter(
        tmp_path / "adapter", base, "qwen2_5_vl",
        target_modules=r".*(patch_embed\.proj|q_proj)",
    )  # fmt: skip
    with pytest.raises(ContractError) as raised:
        merge(base, adapter, tmp_path / "out")
    (finding,) = [finding for finding in raised.value.details if "a convolution" in finding]
    assert finding.startswith("model.visual.patch_embed.proj: ")
    assert "merge_and_unload" in finding
