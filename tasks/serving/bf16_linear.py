"""bf16 linear layers on CPUs without native bf16: computed in fp32, rounded once.

oneDNN emulates bf16 products there, at a third of the speed of fp32 or less. Widening the operands
(exact), multiplying in fp32 and rounding once is what a bf16 product is defined to do; only the
order of summation differs. Training ranks and the reference both use it, so that their results can
agree to the last bit.

Memory: an fp32 copy of one layer's weight and input during its computation. Weights are widened
into one reused buffer, since new memory for every product would fragment the heap.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from tasks.process.block_unused_imports import on_gpu

SCRATCH = 32 << 20
"""Bytes up to which the buffer is kept. malloc returns larger blocks to the system by itself."""
EMULATED = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")
"""Values of oneDNN's `ONEDNN_MAX_CPU_ISA` under which it emulates bf16 products."""
_buffers = threading.local()


def slow_bf16() -> bool:
    """Return True if this process computes on a CPU and oneDNN emulates bf16 products there.

    That is the case on older CPUs, or if oneDNN's variable says so. Always False with a GPU.
    """
    import torch

    if on_gpu():
        return False
    if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in EMULATED:
        return True
    return not (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def widened_weight(weight: Any) -> Any:
    """Return `weight` in fp32, in a buffer that the next call in this thread overwrites.

    Args:
        weight: any shape and dtype; gradients do not pass through.
    """
    import torch

    if weight.numel() * 4 > SCRATCH:
        return weight.detach().float()
    if not hasattr(_buffers, "buffer") or len(_buffers.buffer) < weight.numel():
        with torch.inference_mode(False):  # an inference tensor could not be written to later
            _buffers.buffer = torch.empty(weight.numel(), dtype=torch.float32)
    view = _buffers.buffer[: weight.numel()].view(weight.shape)
    return view.copy_(weight.detach())


def use_fp32_where_faster() -> bool:
    """Replace `torch.nn.functional.linear` for bf16 on CPU in this process, where it is slow.

    Call it before a library keeps a reference to the function (DeepSpeed's `zero.Init` does).

    Returns:
        True if it was replaced; False on GPUs and on CPUs with AVX-512 BF16 or AMX.
    """
    import torch

    if not slow_bf16():
        return False
    plain = torch.nn.functional.linear
    widened = _widened()

    def linear(input: Any, weight: Any, bias: Any = None) -> Any:
        same = input.dtype == weight.dtype == torch.bfloat16
        if not same or input.device.type != "cpu":
            return plain(input, weight, bias)
        return widened.apply(input, weight, bias)

    torch.nn.functional.linear = linear
    return True


def _widened() -> Any:
    """Return the layer as an autograd function that saves bf16 operands, not their fp32 copies."""
    import torch

    class Widened(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, bias: Any) -> Any:
            ctx.save_for_backward(x, weight)
            out = x.float() @ widened_weight(weight).t()
            if bias is not None:
                out += bias.float()
            return out.to(x.dtype)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, weight = ctx.saved_tensors
            grad = grads[0].float()
            rows = grad.reshape(-1, grad.shape[-1])
            for_x, for_weight, for_bias = ctx.needs_input_grad
            return (
                (grad @ widened_weight(weight)).to(x.dtype) if for_x else None,
                (rows.t() @ x.reshape(-1, x.shape[-1]).float()).to(weight.dtype)
                if for_weight
                else None,
                rows.sum(0).to(weight.dtype) if for_bias else None,
            )

    return Widened
