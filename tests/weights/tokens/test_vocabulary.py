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
from tasks.weights.families.merging import plan_merge
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.contracts import model_facts
from tasks.weights.tokens.tokenizer import TokenizerFacts
from tasks.weights.tokens.vocabulary import Vocabulary, vocabulary_of
from tests.weights.adapters.making import quiet, save, train
from tests.weights.families.making import FAMILIES, make_model, merge

GROWN = 104  # from 96


def tokenizer(rows: int, *, pad: int | None = None) -> TokenizerFacts:
    """Return facts of a tokenizer with `rows` ids, the last of which is EOS."""
    return TokenizerFacts(rows, eos=rows - 1, pad=pad, end_of_turn=None, template="")


def grown_adapter(tmp_path: Path, family: str, **options: Any) -> tuple[Path, Path, Any]:
    """Make a base, an adapter trained after the vocabulary grew, and the merged model."""
    from peft import LoraConfig

    model = make_model(FAMILIES[family].config(tie_word_embeddings=family == "qwen2")).float()
    with quiet():
        model.save_pretrained(tmp_path / "base")
        larger = copy.deepcopy(model)
        torch.manual_seed(1)
        larger.resize_token_embeddings(GROWN)
    wrapped = train(larger, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    save(wrapped, tmp_path / "adapter", **options)
    with quiet():
        return tmp_path / "base", tmp_path / "adapter", wrapped.merge_and_unload()


def sizes_of(base: Path, adapter: Path, vocabulary: TokenizerFacts) -> Vocabulary:
    """Plan a merge and return its sizes."""
    lora, config = read_adapter(adapter), json.loads((base / "config.json").read_text())
    facts = model_facts(base, "float32")
    weights = read_checkpoint(base)
    operands = {f"adapter:{key}": tensor for key, tensor in lora.tensors.tensors.items()}
    plan = plan_merge(weights.tensors, facts, changes([(lora, 1.0)], facts.live), operands)
    planned = {op.name: op.shape for op in plan.ops}
    stored = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
    return vocabulary_of(planned, facts, vocabulary, config, stored)


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_a_grown_vocabulary_comes_out_as_training_left_it(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    base, adapter, merged = grown_adapter(tmp_path, family, save_embedding_layers=True)
    sizes = sizes_of(base, adapter, tokenizer(100, pad=98))
    merge(base, adapter, tmp_path / "out", dtype="F32")
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


def test_adapters_without_all_grown_embeddings_are_refused_with_the_numbers(
    tmp_path: Path,
) -> None:
    from safetensors.torch import load_file, save_file

    base, adapter, _ = grown_adapter(tmp_path / "a", "llama", save_embedding_layers=False)
    text = "\n".join(sizes_of(base, adapter, tokenizer(100)).findings())
    assert all(thing in text for thing in ("100", "96", "save_embedding_layers=True"))
    base, adapter, _ = grown_adapter(tmp_path / "b", "llama", save_embedding_layers=True)
    path = adapter / "adapter_model.safetensors"
    tensors = {k: t for k, t in load_file(path).items() if "lm_head" not in k or "lora" in k}
    save_file(tensors, path, metadata={"format": "pt"})
    text = "\n".join(sizes_of(base, adapter, tokenizer(100)).findings())
    assert "104" in text
    assert "96" in text


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (Vocabulary(97, 96), "97"),
        (Vocabulary(96, 96, head_rows=90), "90"),
        (Vocabulary(90, 96, special={"pad_token_id": 96}), "pad_token_id is 96"),
        (Vocabulary(90, 96, special={"pad_token_id": -1}), "pad_token_id is -1"),
    ],
)
def test_sizes_that_disagree(sizes: Vocabulary, text: str) -> None:
    assert any(text in line for line in sizes.findings())


def test_a_padded_embedding_is_fine() -> None:
    assert not list(Vocabulary(97, 128, 128, 128, 128, {"pad_token_id": 96}).findings())
