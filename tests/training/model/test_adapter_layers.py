"""Adapters without ranks: PiSSA's start, and the fused LoRA layer against peft's own."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from tasks.training.job import Peft
from tasks.training.model.adapter import add_adapter
from tasks.training.model.fused_lora import fuse


def answer(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return logits of a fixed batch, and gradients of a function of all of them."""
    model.zero_grad(set_to_none=True)
    logits = model(input_ids=torch.arange(3, 35).reshape(2, 16)).logits.float()
    logits.square().mean().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_the_fused_layer_computes_the_numbers_of_peft() -> None:
    from peft import LoraConfig, get_peft_model

    from tests.weights.families.making import FAMILIES, make_model

    base = make_model(FAMILIES["qwen2"].config()).float()
    config = LoraConfig(r=3, lora_alpha=5, target_modules="all-linear")
    model = get_peft_model(base, config, autocast_adapter_dtype=False).train()
    torch.manual_seed(7)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    logits, gradients = answer(model)
    fused = copy.deepcopy(model)
    assert fuse(fused) == 14
    computed, mine = answer(fused)
    torch.testing.assert_close(computed, logits, rtol=1e-5, atol=1e-5)
    assert mine.keys() == gradients.keys()
    for name, gradient in gradients.items():
        bound = 1e-5 * max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=bound)


def test_pissa_begins_with_the_bases_principal_components(base: Path, tmp_path: Path) -> None:
    """Meng et al. 2024, eq. 2 and 3; the second half subtracts the first."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = answer(model)[0]
    peft = Peft("lora", rank=4, alpha=8, init="pissa")
    store = f"file://{tmp_path / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        ranks: Any = SimpleNamespace(rank=0, world_size=1)
        adapted: Any = add_adapter(model, peft, head="tokens", dtype=torch.float32, ranks=ranks)
    finally:
        dist.destroy_process_group()
    torch.testing.assert_close(answer(adapted)[0], before, rtol=0, atol=1e-4)
    layer = adapted.get_base_model().model.layers[1].self_attn.q_proj
    a, b = (layer.lora_A["default"].weight, layer.lora_B["default"].weight)
    u, s, vt = torch.linalg.svd(layer.base_layer.weight.double())
    best = u[:, :4] * s[:4] @ vt[:4]
    assert (2 * b[:, :4].double() @ a[:4].double() - best).norm() < 0.01 * best.norm()
    assert torch.equal(a[:4], a[4:])
    assert torch.equal(b[:, :4], -b[:, 4:])
