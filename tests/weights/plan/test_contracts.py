"""Facts of a model and the contract of its adapters, from configurations alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tasks.core.contract import Expected, judge
from tasks.core.errors import ArtifactError
from tasks.pipeline.artifact import Artifact
from tasks.weights.execute.worker import perform
from tasks.weights.files.header import read_header
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.contracts import ModelFacts, adapter_contract, model_facts


@pytest.mark.parametrize("family", ["llama", "qwen"])
def test_a_models_tensors_are_what_save_pretrained_writes(family: str, request) -> None:
    base: Artifact = request.getfixturevalue(family)
    checkpoint = read_checkpoint(base.path)
    checks = judge(model_facts(base.path).tensors, checkpoint.tensors)
    assert len(checks) >= 20
    assert all(check.ok for check in checks)
    assert "lm_head.weight" not in model_facts(base.path).quantized


def test_facts_of_a_tied_model(qwen: Artifact) -> None:
    facts = model_facts(qwen.path)
    assert facts.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert facts.embedding == "model.embed_tokens.weight"
    assert "lm_head.weight" not in {tensor.name for tensor in facts.tensors}
    assert Expected("model.embed_tokens.weight", (300, 64), "BF16") in facts.tensors
    assert len(facts.quantized) == 14
    request = {"do": "model_facts", "config": str(qwen.path), "dtype": "bfloat16"}
    reply = json.loads(json.dumps(perform(request)))
    assert ModelFacts.from_json(reply) == facts


def test_adapter_contract_is_what_peft_writes(llama, lora_adapter: Path, tmp_path: Path) -> None:
    header = read_header(lora_adapter / "adapter_model.safetensors")
    contract = adapter_contract(llama.path, lora_adapter / "adapter_config.json")
    assert len(contract) == 28
    assert all(check.ok for check in judge(contract, header.tensors))
    path = tmp_path / "adapter_config.json"
    document = json.loads((lora_adapter / "adapter_config.json").read_text())
    path.write_text(json.dumps({**document, "target_modules": ["v_proj"], "r": 7}))
    shapes = [expected.shape for expected in adapter_contract(llama.path, path)]
    assert sorted(shapes) == [(7, 64), (7, 64), (32, 7), (32, 7)]
    path.write_text(json.dumps({**document, "target_modules": ["c_attn"]}))
    with pytest.raises(ArtifactError, match=r"adapter_config\.json|c_attn"):
        adapter_contract(llama.path, path)


@pytest.mark.parametrize("text", ['{"model_type": "no-such-model"}', "{", '{"hidden_size": 3}'])
def test_a_config_that_describes_no_model_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ArtifactError, match=str(tmp_path)):
        model_facts(tmp_path)


def test_no_storage_is_allocated_for_a_model_of_any_size(qwen: Artifact, tmp_path: Path) -> None:
    """Uses a config of 100 billion parameters, whose tensors would not fit in memory."""
    folder = shutil.copytree(qwen.path, tmp_path / "large")
    path = folder / "config.json"
    document = {**json.loads(path.read_text()), "hidden_size": 32768, "intermediate_size": 524288}
    path.write_text(json.dumps({**document, "num_attention_heads": 64}))
    sizes = [tensor.shape for tensor in model_facts(folder).tensors]
    assert sum(a * b for a, b in (s for s in sizes if len(s) == 2)) > 10**11
