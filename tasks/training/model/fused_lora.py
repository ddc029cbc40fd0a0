"""A LoRA layer as one autograd function: y = x W^T + b + s (x A^T) B^T.

Hu et al. 2021, arXiv:2106.09685. peft computes the adapter's product, scales it and adds it; each
is a pass over an activation. Here the second product accumulates onto the first: fewer passes, less
memory, one rounding instead of three.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn

ADAPTER = "default"


def fuse(model: nn.Module) -> int:
    """Replace the forward pass of every plain LoRA layer in `model`.

    Not replaced: layers over anything but `nn.Linear` (4-bit, experts), layers with DoRA, dropout
    or their own bias, and all layers under ZeRO-3, which gathers weights in hooks of modules.

    Args:
        model: peft's model, before DeepSpeed wraps it.

    Returns:
        The number of layers replaced.
    """
    from peft.tuners.lora import Linear

    layers = [m for m in model.modules() if type(m) is Linear and _is_plain(m)]
    for layer in layers:
        _exchange(layer)
    return len(layers)


def unfuse(model: nn.Module) -> None:
    """Undo `fuse`: fingerprints use peft's own arithmetic, which other scorers repeat."""
    from peft.tuners.lora import Linear

    for layer in model.modules():
        if type(layer) is Linear:
            layer.__dict__.pop("forward", None)


def _is_plain(layer: Any) -> bool:
    base = layer.get_base_layer()
    return (
        type(base) is nn.Linear
        and not any(parameter.requires_grad for parameter in base.parameters())
        and not hasattr(base.weight, "ds_id")
        and list(layer.lora_A) == [ADAPTER]
        and not layer.use_dora[ADAPTER]
        and layer.lora_B[ADAPTER].bias is None
        and isinstance(layer.lora_dropout[ADAPTER], nn.Identity)
        and ADAPTER not in layer.lora_variant
        and layer.lora_A[ADAPTER].weight.dtype == base.weight.dtype
    )


def _exchange(layer: Any) -> None:
    plain = layer.forward

    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        weight = self.base_layer.weight
        off = self.disable_adapters or self.merged or self.active_adapters != [ADAPTER]
        if off or args or kwargs or x.dtype != weight.dtype:
            out: torch.Tensor = plain(x, *args, **kwargs)
            return out
        a, b = self.lora_A[ADAPTER].weight, self.lora_B[ADAPTER].weight
        rows = _Fused.apply(x, weight, self.base_layer.bias, a, b, self.scaling[ADAPTER])
        # A view made in a custom function could not be changed in place, as Llama 4's layers do.
        return rows.view(*x.shape[:-1], len(weight))

    layer.forward = types.MethodType(forward, layer)


class _Fused(torch.autograd.Function):
    """LoRA layer: x (..., in), a (r, in), b (out, r) -> (rows, out); weight and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        low = rows @ a.t()
        out = rows @ weight.t() if bias is None else torch.addmm(bias, rows, weight.t())
        out.addmm_(low, b.t(), alpha=scale)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, a, b, low = ctx.saved_tensors
        (grad,) = grads
        grad_low = (grad @ b).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_low, a).view(x.shape)
        grad_a = grad_low.t() @ x.reshape(-1, x.shape[-1])
        grad_b = (grad.t() @ low).mul_(ctx.scale)
        return grad_x, None, None, grad_a, grad_b, None
