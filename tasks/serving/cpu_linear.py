"""Matrix products of vLLM's engine on a CPU: packed for oneDNN, a few plans for all batches.

Two things are done otherwise than vLLM does them.

Number format: CPUs without bf16 products emulate them; `tasks.bf16_linear` says why fp32 is as
good. Training ranks do the same, so that both engines compute the same products. Here weights do
not change between hand-offs: they are widened once and kept, 4 bytes a number for vLLM's packed 2.

Rows: oneDNN compiles a plan for every number of rows, about a millisecond and 0.4 MB each, and
keeps 1,024. Replies end one after the other, so a rollout of 128 goes through 128 numbers for every
shape of a layer: more than are kept, and all of them are compiled again in every rollout. So rows
are filled up with zeros to few numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tasks.bf16_linear import slow_bf16

PRIMITIVES = 32
"""Numbers of rows that oneDNN's plans are kept for; vLLM's own number."""
_MISSING = [0] * 64 + [-n % 16 for n in range(64, 128)] + [-n % 32 for n in range(128, 512)]
"""How many rows are filled up, by their number: 72 numbers up to 256, times some 13 shapes. More
rows are prompts, which differ anyway."""
Product = Callable[..., torch.Tensor]
"""`(x, bias=None)`: a linear layer."""


def use_packed_products() -> None:
    """Have models that vLLM loads in this process from now on compute so."""
    from vllm.model_executor.layers import utils

    theirs = utils.dispatch_cpu_unquantized_gemm
    if getattr(theirs, "is_ours", False):
        return

    def dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        known = weight.ndim == 2 and weight.dtype in (torch.bfloat16, torch.float32)
        if weight.is_meta or not known or utils.check_cpu_sgl_kernel(*weight.shape, weight.dtype):
            theirs(layer, remove_weight)  # on CPUs with AMX it has other kernels for small layers
            return
        product = packed(weight)
        layer.cpu_linear = lambda x, _, bias=None: product(x, bias)
        if remove_weight:
            nothing = torch.empty(0, dtype=weight.dtype, device=weight.device)
            layer.weight = torch.nn.Parameter(nothing, requires_grad=False)

    dispatch.is_ours = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = dispatch


def packed(weight: torch.Tensor) -> Product:
    """A linear layer on a copy of `weight` (o, i), in the number format that is fast here.

    What it gives has the number format of its input.
    """
    slow = weight.dtype == torch.float16 or (weight.dtype == torch.bfloat16 and slow_bf16())
    return widened(weight) if slow else _packed(weight)


def widened(weight: torch.Tensor) -> Product:
    """The same on an fp32 copy, rounded once."""
    product = _packed(weight.float())

    def linear(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        wide_bias = None if bias is None else bias.float()
        return product(x.float(), wide_bias).to(x.dtype)

    return linear


def _packed(weight: torch.Tensor) -> Product:
    from vllm import _custom_ops as ops

    # oneDNN is a third faster than MKL with some dozens of rows.
    handler = ops.create_onednn_mm(weight.detach().t(), PRIMITIVES)

    def linear(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if x.dim() != 2:
            return linear(x.flatten(0, -2), bias).view(*x.shape[:-1], -1)
        rows = filled_up(x)
        out = ops.onednn_mm(handler, rows, bias)
        return out if rows is x else out[: x.shape[0]]

    return linear


def filled_up(rows: torch.Tensor) -> torch.Tensor:
    """`rows` (n, i) and zeros below them, or `rows` itself."""
    count = rows.shape[0]
    missing = _MISSING[count] if count < len(_MISSING) else 0
    return torch.cat((rows, _zeros(rows.shape[1], rows.dtype)[:missing])) if missing else rows


@functools.cache
def _zeros(width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(max(_MISSING), width, dtype=dtype)
