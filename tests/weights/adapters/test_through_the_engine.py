"""The full path on disk: adapter and base folders, plan, validation, execution."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.values import require_values
from tasks.weights.execute.execute import execute
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.contracts import model_facts
from tasks.weights.plan.validate import validate
from tasks.weights.proof.recheck import recompute
from tests.weights.adapters.making import base_model, opened, our_merge, quiet, save, train
from tests.weights.making import state_of

QV = ["q_proj", "v_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": "all-linear"}),
    "dora": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "many things": (
        "qwen2",
        {
            "target_modules": QV,
            "bias": "all",
            "lora_bias": True,
            "modules_to_save": ["model.norm"],
            "trainable_token_indices": [3, 95],
        },
    ),
    "untied": ("qwen2", {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "untied by a pair": ("qwen2", {"target_modules": ["embed_tokens", "q_proj"]}),
    "untied by rows": (
        "qwen2",
        {"target_modules": QV, "trainable_token_indices": {"lm_head": [6, 7]}},
    ),
    "experts": (
        "mixtral",
        {"target_modules": QV, "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]},
    ),
}


AS_PEFT = MergeSettings(rounding="nearest")
"""peft rounds to nearest."""


def _merged(base: Path, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Merge on disk and return the tensors by the base's keys."""
    adapters = opened(folder)
    facts = model_facts(base)
    total = changes(adapters, facts.live)
    require_values([adapter for adapter, _ in adapters], total.copies)
    operands = {f"adapter:{key}": info for key, info in adapters[0][0].tensors.tensors.items()}
    source = read_checkpoint(base)
    plan = plan_merge(source.tensors, facts, total, operands, AS_PEFT)
    sources = {"base": source, "adapter": adapters[0][0].tensors}
    out.mkdir()
    validate(plan, sources, out=out)
    execute(plan, sources, out, workers=2)
    written = read_checkpoint(out)
    results = recompute(plan, sources, written)
    assert [result for result in results if result.wrong or result.skipped] == []
    return state_of(out)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_merge_in_memory(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    model = base_model(family)
    with quiet():
        copy.deepcopy(model).bfloat16().save_pretrained(tmp_path / "base")
    folder = save(train(model, LoraConfig(r=4, lora_alpha=6, **options)), tmp_path / "adapter")
    ours = _merged(tmp_path / "base", folder, tmp_path / "out")
    expected = our_merge(model, opened(folder))
    if family == "mixtral":  # one tensor an expert on disk; the order of stacking is transformers'
        with quiet():
            trained = base_model(family)
            trained.load_state_dict({name: tensor.float() for name, tensor in expected.items()})
            trained.bfloat16().save_pretrained(tmp_path / "expected")
        expected = state_of(tmp_path / "expected")
    elif "lm_head.weight" not in ours:
        del expected["lm_head.weight"]
    assert set(ours) == set(expected)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_grown_vocabulary(tmp_path: Path) -> None:
    model = base_model("llama")
    with quiet():
        copy.deepcopy(model).bfloat16().save_pretrained(tmp_path / "base")
        grown = copy.deepcopy(model)
        grown.resize_token_embeddings(101, mean_resizing=False)
    trained = train(grown, LoraConfig(r=4, target_modules=QV))
    folder = save(trained.bfloat16(), tmp_path / "adapter", save_embedding_layers=True)
    ours = _merged(tmp_path / "base", folder, tmp_path / "out")
    expected = our_merge(model, opened(folder))
    assert ours["lm_head.weight"].shape == (101, 32)
    assert all(torch.equal(ours[name], expected[name]) for name in expected)
