"""A right merge is proven in every arithmetic, and one wrong number is found.

The corpus of the audit (`broken_merges.py`) has a merge for every diagnosis.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.weights.files.opening import open_model
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.operations import Plan
from tasks.weights.proof.faults import State
from tasks.weights.proof.merge import Proof, prove_merge
from tasks.weights.proof.planning import planned
from tests.weights.adapters.making import save, train
from tests.weights.families.making import FAMILIES, load, make_model, merged_by_peft
from tests.weights.making import merged

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


def made(folder: Path, family: str, settings: Mapping[str, Any]) -> tuple[Path, Path]:
    """Save a base and an adapter."""
    from peft import LoraConfig

    base, tied = folder / "base", {"tie_word_embeddings": family == "qwen2"}
    config = FAMILIES[family].config(hidden_size=64, num_hidden_layers=3, **tied)
    make_model(config).save_pretrained(base)
    options = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **settings}
    wrapped = train(load(base), LoraConfig(task_type="CAUSAL_LM", **options))
    return base, save(wrapped, folder / "adapter")


def prove(base: Path, adapter: Path, folder: Path) -> Proof:
    plan = planned(base, adapter)
    return prove_merge(plan.plan, plan.sources, open_model(folder), any_base=True, tied=plan.tied)


@pytest.mark.parametrize(("family", "settings"), RIGHT)
def test_a_right_merge_is_proven_in_every_arithmetic(
    tmp_path: Path, family: str, settings: Mapping[str, Any]
) -> None:
    base, adapter = made(tmp_path, family, settings)
    for arithmetic, stored in (("bfloat16", "bfloat16"), ("float16", "float16"), ("float32",) * 2):
        folder = tmp_path / arithmetic
        model = load(base, getattr(torch, arithmetic))
        merged_by_peft(model, adapter, dtype=getattr(torch, stored)).save_pretrained(folder)
        proof = prove(base, adapter, folder)
        assert proof.ok, (arithmetic, stored, proof.faults, proof.scale)
        assert any(verdict.touched for verdict in proof.verdicts)
        assert abs(proof.scale - 1) < 1e-3


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
    changed = {O_PROJ: State.CHANGED, "model.norm.weight": State.CHANGED}
    states = {verdict.name: verdict.state for verdict in proof.faults}
    assert states == {**changed, Q_PROJ: State.MISSING}
    assert [fault.sums.beyond for fault in proof.faults if fault.name in changed] == [1, 1]
    assert [fault.touched for fault in proof.faults if fault.name in changed] == [True, False]
    assert proof.extra == ("v_head.weight",)


def test_a_merge_of_ours_is_proven_by_its_plan(
    qwen: Any, qlora_adapter: Path, qlora_run: Path, tmp_path: Path
) -> None:
    sources = {
        "base": read_checkpoint(qwen.path),
        "adapter": read_checkpoint(qlora_adapter, "adapter_model"),
    }
    plans = {}
    for mode in ("dequantized", "original"):
        (out := tmp_path / mode).mkdir()
        report = merged(out, qlora_adapter, qwen.path, qlora_run, base_mode=mode)
        plans[mode] = Plan.from_json(json.loads(json.dumps(report.notes["plan"])))
        proof = prove_merge(plans[mode], sources, read_checkpoint(out))
        assert proof.ok, proof.faults
        assert len(proof.dequantized) == (14 if mode == "dequantized" else 0)
    wrong = prove_merge(plans["dequantized"], sources, read_checkpoint(tmp_path / "original"))
    assert [fault.state for fault in wrong.faults] == [State.BASE_MODE] * 14
