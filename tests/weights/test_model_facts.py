"""Facts of a model and the contract of its adapters, from configurations alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.audit.class_contract import perform_apart
from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import read_json
from tasks.weights.model import facts_of, model_facts, plain_model
from tasks.weights.model_class import meta_model
from tests.tiny import FAMILIES

RARE = [
    pytest.param(family, marks=pytest.mark.slow)
    for family in ("mistral", "qwen3", "gemma2", "gemma3_text")
]
HUGE = 10**9


def _config(folder: Path, family: str, **changes: Any) -> Path:
    """Save the configuration of a language model of this family."""
    config = FAMILIES[family].config(**changes)
    name = type(config).__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
    config.architectures = [name]
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", *RARE])
def test_facts_equal_those_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    folder = _config(tmp_path, family, tie_word_embeddings=tied)
    plain = plain_model(read_json(folder / "config.json"), "bfloat16", None)
    real = facts_of(meta_model(folder, "bfloat16"))
    assert plain is not None
    assert sorted(plain.tensors, key=str) == sorted(real.tensors, key=str)
    assert sorted(plain.slots, key=str) == sorted(real.slots, key=str)
    assert set(plain.quantized) == set(real.quantized)
    assert (plain.tied, plain.embedding, plain.aliases) == (real.tied, real.embedding, real.aliases)
    assert (plain.unread, plain.findings) == (real.unread, real.findings)
    assert list(plain.parameters) == list(real.parameters)
    assert plain.parameters == real.parameters
    with_tensors = {name.rpartition(".")[0] for name in real.parameters}
    kinds = {name: real.modules[name] for name in plain.modules}
    assert plain.modules == kinds
    assert with_tensors <= set(kinds)
    assert {name for name, kind in real.modules.items() if kind != "other"} <= set(kinds)
    for field in ("ties", "transposed", "input_embedding", "output_embedding"):
        assert getattr(plain, field) == getattr(real, field)


def test_other_configurations_are_left_to_transformers(tmp_path: Path) -> None:
    document = read_json(_config(tmp_path, "llama") / "config.json")
    for changes in (
        {"attention_bias": True},
        {"architectures": ["LlamaForSequenceClassification"]},
        {"architectures": None},
        {"num_key_value_heads": None},
        {"tie_word_embeddings": None},
        {"hidden_size": "32"},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
    ):
        assert plain_model({**document, **changes}, "bfloat16", None) is None, changes
    disk = {tensor.name: tensor.shape for tensor in model_facts(tmp_path).tensors}
    assert plain_model(document, "bfloat16", disk) is not None
    name = "model.layers.1.mlp.up_proj.weight"
    missing = {key: shape for key, shape in disk.items() if key != name}
    for other in (missing, disk | {name: (7, 32)}, disk | {"model.extra": (7, 32)}):
        assert plain_model(document, "bfloat16", other) is None
        assert model_facts(tmp_path, disk=other).findings


def test_a_tied_head_is_no_tensor_of_its_own_and_may_be_stored_too(tmp_path: Path) -> None:
    folder = _config(tmp_path, "qwen2", tie_word_embeddings=True)
    facts = model_facts(folder)
    assert facts.tied == {"lm_head.weight": facts.embedding}
    disk = {tensor.name: tensor.shape for tensor in facts.tensors}
    assert perform_apart(model_facts, folder, "bfloat16", disk) == model_facts(folder, disk=disk)
    stored = model_facts(folder, disk={**disk, "lm_head.weight": disk[facts.embedding]})
    assert "lm_head.weight" in {slot.key for slot in stored.slots}
    for each in (facts, stored):
        assert "lm_head.weight" not in {tensor.name for tensor in each.tensors}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mixtral", {"num_hidden_layers": HUGE}),  # needs transformers
        ("qwen2", {"vocab_size": 10**18}),
        ("qwen2", {"hidden_size": "32"}),
        ("qwen2", {"model_type": "no-such-model"}),
    ],
)
def test_a_config_that_describes_no_possible_model_is_refused(family, changes, tmp_path) -> None:
    path = _config(tmp_path, family) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes | {"head_dim": None}))
    with pytest.raises(ArtifactError, match=str(tmp_path)):
        model_facts(tmp_path, disk={"x": (1,)})
