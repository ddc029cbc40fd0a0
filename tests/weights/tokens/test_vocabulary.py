"""Sizes of tokenizer, embeddings and configuration that disagree are refused with the numbers."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file

from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.read import read_adapter
from tasks.weights.families.merging import plan_merge
from tasks.weights.files.reader import read_checkpoint
from tasks.weights.plan.contracts import model_facts
from tasks.weights.tokens.tokenizer import TokenizerFacts
from tasks.weights.tokens.vocabulary import Vocabulary, vocabulary_of
from tests.weights.adapters.making import quiet, save, train
from tests.weights.families.making import FAMILIES, make_model

GROWN = 104  # from 96


def _sizes(base: Path, adapter: Path) -> Vocabulary:
    """Plan a merge and return its sizes, for a tokenizer of 100 ids."""
    lora, config = read_adapter(adapter), json.loads((base / "config.json").read_text())
    facts, weights = model_facts(base, "float32"), read_checkpoint(base)
    operands = {f"adapter:{key}": tensor for key, tensor in lora.tensors.tensors.items()}
    plan = plan_merge(weights.tensors, facts, changes([(lora, 1.0)], facts.live), operands)
    planned = {op.name: op.shape for op in plan.ops}
    stored = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
    tokenizer = TokenizerFacts(100, eos=99, pad=98, end_of_turn=None, template="")
    return vocabulary_of(planned, facts, tokenizer, config, stored)


def test_an_adapter_without_all_grown_embeddings_is_refused(tmp_path: Path) -> None:
    from peft import LoraConfig

    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = make_model(FAMILIES["llama"].config(tie_word_embeddings=False)).float()
    with quiet():
        model.save_pretrained(base)
        model.resize_token_embeddings(GROWN, mean_resizing=False)
    trained = train(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    save(trained, adapter, save_embedding_layers=True)
    sizes = _sizes(base, adapter)
    assert (sizes.base_rows, sizes.rows, sizes.head_rows, sizes.config) == (96, GROWN, GROWN, 96)
    assert not list(sizes.findings())
    path = adapter / "adapter_model.safetensors"
    whole = load_file(path)
    for left_out, things in (
        (("lm_head",), ("104", "96")),
        (("lm_head", "embed_tokens"), ("100", "96", "save_embedding_layers=True")),
    ):
        kept = {
            name: tensor
            for name, tensor in whole.items()
            if "lora" in name or not any(part in name for part in left_out)
        }
        save_file(kept, path, metadata={"format": "pt"})
        text = "\n".join(_sizes(base, adapter).findings())
        assert [thing for thing in things if thing not in text] == []


def test_sizes_that_disagree_and_a_padded_embedding() -> None:
    for sizes, text in (
        (Vocabulary(97, 96), "97"),
        (Vocabulary(96, 96, head_rows=90), "90"),
        (Vocabulary(90, 96, special={"pad_token_id": 96}), "pad_token_id is 96"),
        (Vocabulary(90, 96, special={"pad_token_id": -1}), "pad_token_id is -1"),
    ):
        assert any(text in line for line in sizes.findings()), sizes
    assert not list(Vocabulary(97, 128, 128, 128, 128, {"pad_token_id": 96}).findings())
