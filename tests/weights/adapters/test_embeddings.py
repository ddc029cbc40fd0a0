"""Embeddings: tied ones trained separately or together, and vocabularies that grew."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from tasks.weights.adapters.changes import changes
from tasks.weights.adapters.live import live_model
from tasks.weights.adapters.read import read_adapter
from tasks.weights.adapters.values import require_values
from tests.weights.adapters.making import (
    base_model,
    compare,
    opened,
    our_merge,
    peft_merge,
    quiet,
    save,
    train,
)

QV = ["q_proj", "v_proj"]
TIED: dict[str, dict[str, Any]] = {
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "head": {"target_modules": ["lm_head"]},
    "both": {"target_modules": ["embed_tokens", "lm_head"]},
    "both, tied": {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True},
    "embedding, tied": {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    "other rows": {
        "target_modules": QV,
        "trainable_token_indices": {"embed_tokens": [4, 5], "lm_head": [6]},
    },
    "rows of the head": {"target_modules": QV, "trainable_token_indices": {"lm_head": [6]}},
}


@pytest.mark.parametrize("case", TIED)
def test_tied_embeddings_are_merged_as_trained(case: str, tmp_path: Path) -> None:
    """Measured against the model before merging.

    peft's own merge is wrong in each of these cases (logits move by 1 to 3, ours by rounding): it
    adds to the one tensor that two layers share, in the last but two even twice.
    """
    model = base_model("qwen2")
    config = LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **TIED[case])
    trained = train(model, config)
    folder = save(trained, tmp_path / "adapter")
    total = changes(opened(folder), live_model(model))
    assert total.unties == (() if case.endswith(", tied") else ("lm_head.weight",))
    merged = copy.deepcopy(model)
    if total.unties:
        merged.lm_head.weight = torch.nn.Parameter(merged.lm_head.weight.detach().clone())
    merged.load_state_dict({n: t.float() for n, t in our_merge(model, opened(folder)).items()})
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert float((merged(ids).logits - trained(ids).logits).abs().max()) < 0.02


def test_grown_tied_embeddings_trained_separately(tmp_path: Path) -> None:
    """The grown tensor is the base of both names, although only one was adapted."""
    base = base_model("qwen2")
    grown = copy.deepcopy(base)
    with quiet():
        grown.resize_token_embeddings(101, mean_resizing=False)
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["lm_head"])
    trained = train(grown, config)
    folder = save(trained, tmp_path / "adapter", save_embedding_layers=True)
    total = changes(opened(folder), live_model(base))
    assert set(total.replacements) == {"lm_head.weight", "model.embed_tokens.weight"}
    assert set(total.terms) == {"lm_head.weight"}
    merged = copy.deepcopy(grown)
    merged.lm_head.weight = torch.nn.Parameter(merged.lm_head.weight.detach().clone())
    merged.load_state_dict({n: t.float() for n, t in our_merge(base, opened(folder)).items()})
    ids = torch.arange(85, 101)[None]
    with torch.no_grad():
        assert float((merged(ids).logits - trained(ids).logits).abs().max()) < 0.02


GROWN: dict[str, tuple[str, dict[str, Any]]] = {
    "stored": ("llama", {"target_modules": QV}),
    "tied": ("qwen2", {"target_modules": QV}),
    "saved": ("llama", {"target_modules": QV, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "rows": ("llama", {"target_modules": QV, "trainable_token_indices": [3, 100]}),
    "tied rows": ("qwen2", {"target_modules": QV, "trainable_token_indices": [3, 100]}),
    "adapted": ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
}


@pytest.mark.parametrize("case", GROWN)
def test_grown_vocabulary(case: str, tmp_path: Path) -> None:
    """The adapter contains the rows of five new tokens."""
    family, settings = GROWN[case]
    base = base_model(family)
    grown = copy.deepcopy(base)
    with quiet():
        grown.resize_token_embeddings(101, mean_resizing=False)
    with torch.no_grad():
        for tensor in grown.parameters():
            tensor.copy_(tensor.bfloat16().float())
    trained = train(grown, LoraConfig(r=4, lora_alpha=6, task_type="CAUSAL_LM", **settings))
    folder = save(trained, tmp_path / "adapter", save_embedding_layers=True)
    total = changes(opened(folder), live_model(base))
    require_values([read_adapter(folder)], total.copies)
    assert set(total.shapes.values()) == {(101, 32)}
    assert ("lm_head.weight" in total.shapes) == (family != "qwen2")  # qwen2 ties it
    theirs = peft_merge(grown, folder)
    compare(our_merge(base, opened(folder)), theirs, grown.state_dict())
