"""vLLM's linear layers on CPUs that cannot multiply bf16: through fp32, and rounded once.

oneDNN emulates bf16 products there; `tasks.bf16_linear` says why fp32 is as good. Training ranks
do the same, so that both engines compute the same products. Here weights do not change between
hand-offs: they are widened once and kept, 4 bytes a number in place of vLLM's packed 2.
"""

from __future__ import annotations

from typing import Any

import torch

from tasks.bf16_linear import slow_bf16

PRIMITIVES = 32
"""Numbers of rows that oneDNN's plans are kept for; vLLM's own number."""


def use_fp32_products() -> bool:
    """Have models that vLLM loads in this process from now on compute so, where bf16 is slow.

    Returns:
        whether they do: not on CPUs with AVX-512 BF16 or AMX.
    """
    from vllm.model_executor.layers import utils

    if not slow_bf16():
        return False
    theirs = utils.dispatch_cpu_unquantized_gemm
    if getattr(theirs, "widens", False):
        return True

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.bfloat16:
            theirs(layer, remove_weight)
            return
        layer.cpu_linear = widened(weight)
        if remove_weight:
            nothing = torch.empty(0, dtype=weight.dtype, device=weight.device)
            layer.weight = torch.nn.Parameter(nothing, requires_grad=False)

    dispatch.widens = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch
    return True


def widened(weight: torch.Tensor) -> Any:
    """A linear layer as vLLM calls it, `(x, weight, bias)`, on an fp32 copy of `weight` (o, i).

    The copy is packed for oneDNN, which is a third faster than MKL with some dozens of rows.
    """
    from vllm import _custom_ops as ops

    packed = ops.create_onednn_mm(weight.detach().float().t(), PRIMITIVES)

    def linear(x: torch.Tensor, _: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        wide_bias = None if bias is None else bias.float()
        return ops.onednn_mm(packed, x.float(), wide_bias).to(x.dtype)

    return linear
