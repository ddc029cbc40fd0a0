"""Adapters without ranks: a run that continues one begins with its numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.core.errors import ArtifactError
from tasks.training.job import Peft
from tasks.training.model.build import (
    add_adapter,
    continue_adapter,
    initial_weights,
    load_into,
)
from tests.tiny import save_base

LORA = Peft("lora", rank=4, alpha=8)
KINDS = {
    "lora": LORA,
    "dora": replace(LORA, use_dora=True),
    "head": replace(LORA, modules_to_save=("lm_head",)),
}
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    return save_base(tmp_path_factory.mktemp("base"), tokenizer, tie_word_embeddings=False)


def adapted(base: Path, peft: Peft, *, head: str = "tokens") -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    kind = AutoModelForCausalLM if head == "tokens" else AutoModelForSequenceClassification
    model = kind.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(0)
    return add_adapter(model, peft, head=head, dtype=torch.float32).eval()


@torch.no_grad()
def logits(model: Any) -> Any:
    return model(IDS).logits


def move(model: Any, seed: int) -> None:
    """Change every trained tensor."""
    torch.manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn_like(parameter)


def saved(base: Path, peft: Peft, folder: Path) -> torch.Tensor:
    """Save a trained adapter; return the model's logits with it."""
    model = adapted(base, peft)
    move(model, 1)
    model.save_pretrained(folder)
    return logits(model)


@pytest.mark.parametrize("peft", KINDS.values(), ids=KINDS)
def test_it_begins_as_the_adapter_and_can_go_back(base: Path, tmp_path: Path, peft: Peft) -> None:
    wanted = saved(base, peft, tmp_path)
    model = adapted(base, peft)
    assert not torch.equal(logits(model), wanted)
    continue_adapter(model, tmp_path)
    assert torch.equal(logits(model), wanted)
    move(model, 2)
    trained = logits(model)
    assert (trained - wanted).abs().max() > 1e-3
    with initial_weights(model):
        assert torch.equal(logits(model), wanted)
    assert torch.equal(logits(model), trained)
    fresh = adapted(base, peft)
    plain = logits(fresh)
    move(fresh, 2)
    with initial_weights(fresh):
        assert torch.equal(logits(fresh), plain), "a new adapter begins as the base"


def test_a_reward_model_takes_the_adapter_and_keeps_its_own_head(
    base: Path, tmp_path: Path
) -> None:
    saved(base, LORA, tmp_path)
    model = adapted(base, LORA, head="score")
    loaded = load_into(model, tmp_path, "default")
    names = [n for n, p in model.named_parameters() if any(p is tensor for tensor in loaded)]
    assert len(names) == len(loaded) == 28  # two halves of seven layers in each of two blocks
    assert not any("score" in name for name in names)


def test_another_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    saved(base, LORA, tmp_path)
    for changes, named in (
        ({"alpha": 16}, "lora_alpha"),
        ({"rank": 8}, "r "),
        ({"target_modules": ("q_proj",)}, "lora_"),
    ):
        with pytest.raises(ArtifactError, match=named):
            continue_adapter(adapted(base, replace(LORA, **changes)), tmp_path)
    continue_adapter(adapted(base, KINDS["head"]), tmp_path)  # a head may be added
