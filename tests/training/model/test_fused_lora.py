"""The fused LoRA layer against peft's own: the same numbers, and no other layers replaced."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from tasks.training.model.fused_lora import fuse
from tests.weights.families.making import FAMILIES, make_model


def adapted(family: str = "qwen2", *, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Return a tiny model with an adapter of random tensors."""
    model = make_model(FAMILIES[family].config()).to(dtype)
    config = LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": "all-linear", **settings})
    made = get_peft_model(model, config, autocast_adapter_dtype=False).train()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return made


def answer(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits of a fixed batch, and gradients of a function of all of them."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=torch.arange(3, 35).reshape(2, 16)).logits.float()
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "qwen2", "phi3", "gpt_neox"])  # with biases, without
def test_the_fused_layer_computes_the_numbers_of_peft(family: str) -> None:
    model = adapted(family)
    logits, gradients = answer(model)
    fused = copy.deepcopy(model)
    layers = sum(name.endswith("lora_A") for name, _ in model.named_modules())
    assert fuse(fused) == layers
    found, mine = answer(fused)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        bound = 1e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=bound)


def test_bf16_is_closer_to_the_truth_than_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    model = adapted(dtype=torch.bfloat16)
    fused = copy.deepcopy(model)
    assert fuse(fused)
    truth = answer(copy.deepcopy(model).float())
    errors = {
        name: distances(answer(one), truth) for name, one in (("peft", model), ("fused", fused))
    }
    assert max(errors["fused"]) < 0.08
    assert sum(errors["fused"]) <= sum(errors["peft"])  # measured: 0.7 of it


def distances(found: Any, truth: Any) -> list[float]:
    """Return the relative differences of logits and of every gradient."""
    pairs = [(found[0], truth[0]), *((found[1][name], other) for name, other in truth[1].items())]
    return [float((mine - other).norm() / other.norm()) for mine, other in pairs]


def test_without_its_adapter_a_layer_is_the_base() -> None:
    model = adapted()
    fuse(model)
    plain = model.get_base_model()
    with torch.no_grad(), model.disable_adapter():
        off = model(input_ids=torch.arange(16)[None]).logits
    on = model(input_ids=torch.arange(16)[None]).logits
    base = plain(input_ids=torch.arange(16)[None]).logits
    assert torch.equal(on, base)
    assert not torch.allclose(on, off)
    fresh = make_model(FAMILIES["qwen2"].config()).float()
    torch.testing.assert_close(off, fresh(input_ids=torch.arange(16)[None]).logits)


@pytest.mark.parametrize(
    ("settings", "fused"),
    # Six of the fourteen layers have a bias.
    [({"lora_dropout": 0.1}, 0), ({"use_dora": True}, 0), ({"bias": "all"}, 8)],
    ids=str,
)
def test_other_layers_are_left_to_peft(settings: dict[str, Any], fused: int) -> None:
    assert fuse(adapted(**settings)) == fused
