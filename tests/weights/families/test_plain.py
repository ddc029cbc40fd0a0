"""Facts from config.json alone equal those from transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.weights.families.meta import meta_model
from tasks.weights.families.plain import plain_facts
from tasks.weights.files.reader import read_json
from tasks.weights.plan.contracts import ModelFacts, facts_of, model_facts
from tests.weights.families.making import FAMILIES, save_base

PLAIN = [
    "llama", "mistral", "granite", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "phi3",
]  # fmt: skip


def _config(folder: Path, family: str, **changes: object) -> Path:
    config = FAMILIES[family].config(**changes)
    names = {"gemma3_text": "Gemma3ForCausalLM"}
    config.architectures = [
        names.get(family, type(config).__name__.replace("Config", "ForCausalLM"))
    ]
    config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "family",
    [
        name if name in ("llama", "qwen2", "phi3") else pytest.param(name, marks=pytest.mark.slow)
        for name in PLAIN
    ],
)
def test_facts_equal_those_of_transformers(tmp_path: Path, family: str, tied: bool) -> None:
    folder = _config(tmp_path, family, tie_word_embeddings=tied)
    fields = plain_facts(read_json(folder / "config.json"), "bfloat16", None)
    assert fields is not None
    plain, real = ModelFacts(**fields), facts_of(meta_model(folder, "bfloat16"))
    assert sorted(plain.tensors, key=str) == sorted(real.tensors, key=str)
    assert sorted(plain.places, key=str) == sorted(real.places, key=str)
    assert set(plain.quantized) == set(real.quantized)
    assert (plain.tied, plain.embedding, plain.aliases) == (real.tied, real.embedding, real.aliases)
    assert (plain.unread, plain.findings) == (real.unread, real.findings)
    assert list(plain.live.tensors) == list(real.live.tensors)
    assert plain.live.tensors == real.live.tensors
    with_tensors = {name.rpartition(".")[0] for name in real.live.tensors}
    kinds = {name: real.live.modules[name] for name in plain.live.modules}
    assert plain.live.modules == kinds
    assert with_tensors <= set(kinds)
    assert {name for name, kind in real.live.modules.items() if kind != "other"} <= set(kinds)
    for field in ("tied", "transposed", "input_embedding", "output_embedding"):
        assert getattr(plain.live, field) == getattr(real.live, field)


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
        assert plain_facts({**document, **changes}, "bfloat16", None) is None, changes
    disk = {tensor.name: tensor.shape for tensor in model_facts(tmp_path).tensors}
    assert plain_facts(document, "bfloat16", disk) is not None
    name = "model.layers.1.mlp.up_proj.weight"
    missing = {key: shape for key, shape in disk.items() if key != name}
    for other in (missing, disk | {name: (7, 32)}, disk | {"model.extra": (7, 32)}):
        assert plain_facts(document, "bfloat16", other) is None
        assert model_facts(tmp_path, disk=other).findings


def test_a_tied_head_may_be_stored_too(tmp_path: Path) -> None:
    folder = _config(tmp_path, "qwen2", tie_word_embeddings=True)
    disk = {tensor.name: tensor.shape for tensor in model_facts(folder).tensors}
    facts = model_facts(folder, disk={**disk, "lm_head.weight": disk["model.embed_tokens.weight"]})
    assert "lm_head.weight" in {place.disk for place in facts.places}
    assert "lm_head.weight" not in {tensor.name for tensor in facts.tensors}


def test_neither_torch_nor_transformers_is_imported(tmp_path: Path) -> None:
    base = save_base(tmp_path / "base", "llama", tied=False)
    code = (
        "import json, sys; from pathlib import Path; from tasks.weights.plan.contracts import *;"
        f"facts = model_facts(Path({str(base)!r}));"
        "heavy = sorted({'torch', 'transformers', 'peft'} & set(sys.modules));"
        "print(json.dumps([len(facts.tensors), heavy]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [21, []]
