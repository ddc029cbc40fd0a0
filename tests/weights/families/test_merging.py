"""Tied tensors, replaced tensors, and terms that do not work on a part of a tensor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tasks.core.contract import Expected
from tasks.core.errors import ContractError
from tasks.weights.adapters.changes import Changes, changes
from tasks.weights.adapters.read import read_adapter
from tasks.weights.families.merge_ops import carry
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.families.places import Place
from tasks.weights.files.header import TensorInfo
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.adapter_ops import Add, Dora, LowRank, Rows
from tasks.weights.plan.contracts import ModelFacts, model_facts
from tasks.weights.plan.operations import Plan
from tests.weights.families.making import load, merged_by_peft, save_adapter, save_base
from tests.weights.families.test_families import merge
from tests.weights.making import state_of

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def _same(actual: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in actual.items())


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi3", "gpt_neox", "falcon", "qwen2_5_vl"])
@pytest.mark.parametrize("dora", [False, True])
def test_other_targets_are_merged_on_disk(tmp_path: Path, family: str, dora: bool) -> None:
    """Includes layers that are fused on disk and in memory: `qkv_proj`, `c_attn`."""
    base = save_base(tmp_path / "base", family, tied=False)
    adapter = save_adapter(tmp_path / "adapter", base, family, use_dora=dora, use_rslora=True)
    merge(base, adapter, tmp_path / "out")
    merged_by_peft(base, adapter).save_pretrained(tmp_path / "peft")
    state = state_of(tmp_path / "out")
    _same(state, state_of(tmp_path / "peft"))
    load(tmp_path / "out")


def test_a_saved_module_replaces_every_part_that_is_stored(tmp_path: Path) -> None:
    """`modules_to_save` on experts: one fused tensor in the adapter, twelve tensors on disk."""
    base = save_base(tmp_path / "base", "qwen3_moe", tied=False)
    adapter = save_adapter(
        tmp_path / "adapter", base, "qwen3_moe",
        target_modules=["q_proj"], target_parameters=None, modules_to_save=["experts", "norm"],
    )  # fmt: skip
    path = adapter / "adapter_model.safetensors"
    state = state_of(adapter, "adapter_model")
    for key in state:
        if "lora" not in key:
            state[key] = state[key] + torch.randn(state[key].shape).to(state[key])
    save_file(state, path, metadata={"format": "pt"})
    plan = merge(base, adapter, tmp_path / "out")
    reference = merged_by_peft(base, adapter)
    reference.save_pretrained(tmp_path / "peft")
    _same(state_of(tmp_path / "out"), state_of(tmp_path / "peft"))
    parts = [op for op in plan.ops if op.source.endswith("layers.0.mlp.experts.gate_up_proj")]
    assert [op.start for op in sorted(parts, key=lambda op: op.start)] == [
        index * 24 * 32 for index in range(8)
    ]
    assert {entry.source for entry in plan.dropped} > {f"base:{op.name}" for op in parts}


def _plan(facts: ModelFacts, base: Path, change: Changes, **settings: object) -> Plan:
    operands = {"a:A": Expected("A", (2, 32), "F32"), "a:B": Expected("B", (96, 2), "F32")}
    weights = read_checkpoint(base)
    return plan_merge(weights.tensors, facts, change, operands, MergeSettings(**settings))


def _changes(terms: dict, unties: tuple[str, ...] = ()) -> Changes:
    return Changes(
        terms=terms, replacements={}, shapes={}, unties=unties, dropped=(), copies={}, findings=()
    )


def test_a_tied_tensor_changes_under_all_its_names(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", tied=True)
    state = state_of(base)
    save_file({**state, HEAD: state[EMBED].clone()}, base / "model.safetensors")
    term = LowRank("a:A", "a:B", 1.0)
    plan = _plan(model_facts(base), base, _changes({EMBED: (term,)}))
    assert {op.name for op in plan.ops if op.terms} == {EMBED, HEAD}
    assert plan.notes == {}


def test_an_untied_tensor_is_stored_separately(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", tied=True)
    term = LowRank("a:A", "a:B", 1.0)
    plan = _plan(model_facts(base), base, _changes({EMBED: (term,)}, unties=(HEAD,)))
    ops = {op.name: op for op in plan.ops}
    assert (ops[EMBED].terms, ops[HEAD].terms) == ((term,), ())
    assert ops[HEAD].source == f"base:{EMBED}"
    assert plan.notes == {"untied": [HEAD]}


def test_peft_on_a_tied_embedding(tmp_path: Path) -> None:
    """LoRA on the embedding alone does not change the head, as in training."""
    base = save_base(tmp_path / "base", "llama", tied=True)
    adapter = save_adapter(tmp_path / "adapter", base, "llama", target_modules=["embed_tokens"])
    facts, lora = model_facts(base), read_adapter(adapter)
    operands = {f"adapter:{key}": info for key, info in lora.tensors.tensors.items()}
    weights = read_checkpoint(base)
    plan = plan_merge(weights.tensors, facts, changes([(lora, 1.0)], facts.live), operands)
    ops = {op.name: op for op in plan.ops}
    assert len(ops[EMBED].terms) == 1
    assert plan.notes == {"untied": [HEAD]}
    assert ops[HEAD].kind == "copy"


def test_quantisation_and_dtype_apply_to_the_right_tensors(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", tied=False)
    facts = model_facts(base)
    names = frozenset(facts.quantized)
    live = {EMBED: (LowRank("a:A", "a:B", 1.0),)}
    for kept in ("original", "dequantized"):
        four = {"type": "nf4", "base": kept}
        plan = _plan(facts, base, _changes(live), quantization=four, quantized=names, dtype="F16")
        quantized = {op.name for op in plan.ops if op.quantization}
        assert quantized == (names if kept == "dequantized" else set())
        assert {op.dtype for op in plan.ops} == {"F16"}


def test_a_change_without_a_tensor_on_disk_is_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", tied=False)
    with pytest.raises(ContractError, match="nowhere.weight: changed by the adapter, but"):
        _plan(model_facts(base), base, _changes({"nowhere.weight": (Add("a:A", 1.0),)}))


def test_facts_of_another_checkpoint_are_refused(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", tied=False)
    facts = model_facts(save_base(tmp_path / "tied", "qwen2", tied=True))
    with pytest.raises(ContractError, match="not in the base"):
        _plan(facts, base, _changes({}))


FUSED = Place("w3", (48, 32), "experts", (4, 96, 32), start=2 * 96 * 32 + 48 * 32)
OPERANDS = {"a:A": TensorInfo((8, 32), "F32", 0, 0)}


def test_a_part_of_a_stack_takes_its_expert_and_its_rows() -> None:
    term = LowRank("a:A", "a:B", 0.5, experts=4)
    assert carry(term, FUSED, OPERANDS) == LowRank(
        "a:A", "a:B", 0.5, a_rows=(4, 6, 1), b_columns=(2, 8, 4), out_start=48
    )


def test_a_transposed_tensor_takes_the_transposed_product() -> None:
    place = Place("w", (32, 96), "live", (96, 32), transpose=True)
    assert carry(LowRank("a:A", "a:B", 1.0), place, OPERANDS).transpose
    assert not carry(LowRank("a:A", "a:B", 1.0, transpose=True), place, OPERANDS).transpose
    with pytest.raises(ValueError, match="rows: not supported on a tensor that is stored"):
        carry(Rows("a:A", (1,)), place, OPERANDS)


@pytest.mark.parametrize(
    ("term", "told"),
    [
        (Dora("a:A", "a:B", "a:m", 1.0), "DoRA needs the norms of all rows, but w3 is only a part"),
        (Rows("a:A", (1,)), "trained rows on a tensor that is stored in parts"),
        (Add("a:A", 1.0), "a bias on a tensor that is stored in parts"),
        (LowRank("a:A", "a:B", 1.0), "a stack of experts"),
    ],
)
def test_terms_that_need_the_full_tensor_are_refused_on_a_part(term, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        carry(term, FUSED, OPERANDS)


def test_the_plan_is_plain_data(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "mixtral", tied=False)
    adapter = save_adapter(tmp_path / "adapter", base, "mixtral")
    plan = merge(base, adapter, tmp_path / "out")
    assert Plan.from_json(json.loads(json.dumps(plan.as_json()))) == plan
    facts = model_facts(base)
    assert ModelFacts.from_json(json.loads(json.dumps(facts.as_json()))) == facts
    load(tmp_path / "out")
