"""4-bit layers compute with the weights that were loaded: before, during, after an evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.serving.reference.load import load_model
from tasks.serving.reference.requests import ModelRef

NF4 = {"type": "nf4", "double_quant": True, "compute_dtype": "bfloat16"}


def linears(model: Any) -> dict[str, Any]:
    from bitsandbytes.nn import Linear4bit

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, Linear4bit)}


def values(model: Any) -> dict[str, Any]:
    from bitsandbytes.functional import dequantize_4bit

    return {
        name: dequantize_4bit(layer.weight.data, layer.weight.quant_state).clone()
        for name, layer in linears(model).items()
    }


def evaluate(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(torch.arange(24)[None]).logits


def test_an_evaluation_changes_no_weight_and_stops_no_gradient(
    served: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: True)  # it repacks
    model = load_model(ModelRef(served, quantization=NF4))
    before, stored = values(model), {k: v.clone() for k, v in model.state_dict().items()}
    logits = evaluate(model)
    assert [n for n, now in values(model).items() if not torch.equal(now, before[n])] == []
    assert [n for n, v in model.state_dict().items() if not torch.equal(v, stored[n])] == []
    embedded = model.get_input_embeddings()(torch.arange(24)[None]).detach().requires_grad_()
    again = model.train()(inputs_embeds=embedded).logits
    assert torch.equal(again, logits), "there is no dropout: training computes the same"
    (gradient,) = torch.autograd.grad(again.float().square().sum(), embedded)
    assert gradient.abs().amax(-1).gt(0).all()
