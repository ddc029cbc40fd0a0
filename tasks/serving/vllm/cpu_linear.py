"""fp32 matrix products for vLLM on CPUs without native bf16.

oneDNN emulates bf16 products there. Training ranks use fp32 products instead
(`tasks.serving.bf16_linear`), and so does the engine inside them. Weights do not change between
syncs, so they are widened once and kept: 4 bytes per number instead of 2. docs/decisions/0016 has
the measurements.
"""

from __future__ import annotations

from typing import Any

import torch

from tasks.serving.bf16_linear import slow_bf16

VLLM_VERSIONS = ("0.32.",)
"""vLLM versions that this was measured with. Other versions run as shipped."""
PRIMITIVES = 32
"""oneDNN plans that vLLM caches per layer."""


def use_fp32_products() -> bool:
    """Give models that vLLM loads in this process from now on fp32 copies of bf16 weights.

    Returns:
        True if bf16 layers are replaced; False on GPUs, on CPUs with native bf16 (`slow_bf16`),
        and with a vLLM version that is not in `VLLM_VERSIONS`.
    """
    import vllm
    from vllm.model_executor.layers import utils

    if not slow_bf16() or not vllm.__version__.startswith(VLLM_VERSIONS):
        return False
    shipped = utils.dispatch_cpu_unquantized_gemm
    if hasattr(shipped, "shipped"):
        return True

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.is_meta or weight.ndim != 2 or weight.dtype != torch.bfloat16:
            shipped(layer, remove_weight)
            return
        layer.cpu_linear = fp32_linear(weight)
        if remove_weight:
            nothing = torch.empty(0, dtype=weight.dtype, device=weight.device)
            layer.weight = torch.nn.Parameter(nothing, requires_grad=False)

    dispatch.shipped = shipped  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch
    return True


def fp32_linear(weight: torch.Tensor) -> Any:
    """Return vLLM's `cpu_linear(x, weight, bias)` on an fp32 copy of `weight` (out, in).

    The result is rounded once, to the dtype of `x`.
    """
    from vllm import _custom_ops as ops

    handler = ops.create_onednn_mm(weight.detach().float().t(), PRIMITIVES)

    def linear(x: torch.Tensor, _: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        wide_bias = None if bias is None else bias.float()
        return ops.onednn_mm(handler, x.float(), wide_bias).to(x.dtype)

    return linear
