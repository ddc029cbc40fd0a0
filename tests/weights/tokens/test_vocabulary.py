"""Grown vocabularies are merged as trained; sizes that disagree are refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.read import read_adapter
from tasks.weights.execute.execute import execute
from tasks.weights.families.merging import MergeSettings, plan_merge
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.contracts import model_facts
from tasks.weights.plan.validate import validate
from tasks.weights.tokens.tokenizer import TokenizerFacts
from tasks.weights.tokens.vocabulary import Vocabulary, resized_config, vocabulary_of
from tests.weights.adapters.making import base_model, quiet, save, train

GROWN = 104  # from 96


def tokenizer(rows: int, *, pad: int | None = None) -> TokenizerFacts:
    """Return facts of a tokenizer with `rows` ids, the last of which is EOS."""
    return TokenizerFacts(rows, eos=rows - 1, pad=pad, end_of_turn=None, template="")


def grown_adapter(tmp_path: Path, family: str, **options: Any) -> tuple[Path, Path, Any]:
    """Make a base, an adapter trained after the vocabulary grew, and the merged model."""
    from peft import LoraConfig

    model = base_model(family)
    with quiet():
        model.save_pretrained(tmp_path / "base")
        larger = copy.deepcopy(model)
        torch.manual_seed(1)
        larger.resize_token_embeddings(GROWN)
    wrapped = train(larger, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    save(wrapped, tmp_path / "adapter", **options)
    with quiet():
        return tmp_path / "base", tmp_path / "adapter", wrapped.merge_and_unload()


def merge(base: Path, adapter: Path, out: Path, vocabulary: TokenizerFacts) -> Vocabulary:
    """Plan, compare the sizes and, if they agree, execute and write config.json."""
    lora, config = read_adapter(adapter), json.loads((base / "config.json").read_text())
    facts = model_facts(base, "float32")
    weights = read_checkpoint(base)
    operands = {f"adapter:{key}": tensor for key, tensor in lora.tensors.tensors.items()}
    total = changes([(lora, 1.0)], facts.live)
    plan = plan_merge(weights.tensors, facts, total, operands, MergeSettings())
    sizes = vocabulary_of(
        {op.name: op.shape for op in plan.ops}, facts, vocabulary, config,
        {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()},
    )  # fmt: skip
    if any(sizes.findings()):
        return sizes
    sources = {"base": weights, "adapter": lora.tensors}
    validate(plan, sources)
    out.mkdir()
    execute(plan, sources, out, workers=1)
    (out / "config.json").write_text(json.dumps(resized_config(config, sizes.rows)))
    return sizes


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_grown_vocabulary_comes_out_as_training_left_it(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    base, adapter, merged = grown_adapter(tmp_path, family, save_embedding_layers=True)
    sizes = merge(base, adapter, tmp_path / "out", tokenizer(100, pad=98))
    assert (sizes.base_rows, sizes.rows, sizes.config) == (96, GROWN, 96)
    assert sizes.head_rows == (None if family == "qwen2" else GROWN)
    model, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.vocab_size == GROWN
    ids = torch.arange(80, GROWN)[None]
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, merged.eval()(ids).logits)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_an_adapter_without_its_grown_embeddings_is_refused_with_the_numbers(
    tmp_path: Path, family: str
) -> None:
    base, adapter, _ = grown_adapter(tmp_path, family, save_embedding_layers=False)
    text = "\n".join(merge(base, adapter, tmp_path / "out", tokenizer(100)).findings())
    assert "the tokenizer has 100 ids, the embedding 96 rows" in text
    assert "save_embedding_layers=True" in text
    assert not (tmp_path / "out").exists()


def test_only_one_of_two_untied_embeddings_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    base, adapter, _ = grown_adapter(tmp_path, "llama", save_embedding_layers=True)
    path = adapter / "adapter_model.safetensors"
    tensors = {
        key: tensor
        for key, tensor in load_file(path).items()
        if not (key.endswith("weight") and "lm_head" in key and "lora" not in key)
    }
    save_file(tensors, path, metadata={"format": "pt"})
    text = "\n".join(merge(base, adapter, tmp_path / "out", tokenizer(100)).findings())
    assert "has 104 rows, the output embedding 96" in text


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (Vocabulary(97, 96), "the tokenizer has 97 ids, the embedding 96 rows; some ids"),
        (Vocabulary(96, 96, head_rows=90), "has 96 rows, the output embedding 90"),
        (Vocabulary(90, 96, special={"pad_token_id": 96}), "pad_token_id is 96"),
        (Vocabulary(90, 96, special={"pad_token_id": -1}), "pad_token_id is -1"),
    ],
)
def test_sizes_that_disagree(sizes: Vocabulary, text: str) -> None:
    assert any(text in line for line in sizes.findings())


def test_a_padded_embedding_is_fine() -> None:
    assert not list(Vocabulary(97, 128, 128, 128, 128, {"pad_token_id": 96}).findings())


def test_config_is_resized_for_nested_configurations() -> None:
    assert resized_config({"vocab_size": 4, "x": 1}, 8) == {"vocab_size": 8, "x": 1}
    nested = {"text_config": {"vocab_size": 4, "y": 2}}
    assert resized_config(nested, 8) == {"text_config": {"vocab_size": 8, "y": 2}}
