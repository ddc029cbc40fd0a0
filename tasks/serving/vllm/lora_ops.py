"""Faster LoRA for vLLM's engine on a CPU, for batches in which every token uses one adapter.

vLLM 0.32 copies the adapter's matrices once per token before it multiplies. In rollouts all tokens
use one adapter, so one matrix product per layer gives the same sums. Batches with several adapters
go through vLLM's own functions. docs/decisions.md, 16, has the measurements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tasks.process.torch_process import on_gpu

VLLM_VERSIONS = ("0.32.",)
"""vLLM versions that this was measured with. Other versions run as shipped."""


def prepare_server() -> None:
    """Prepare a vLLM server on a CPU; its plugin, see `server.plugin`."""
    # vLLM 0.32's attention uses AMX and does not ask the kernel for it: an illegal instruction
    # where nothing has asked before.
    torch.cpu._init_amx()
    use_single_adapter_products()


def use_single_adapter_products() -> bool:
    """Replace vLLM's CPU LoRA functions in this process; return True if they are.

    On a GPU, and with a vLLM version that is not in `VLLM_VERSIONS`, they are not.
    """
    import vllm
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    if on_gpu() or not vllm.__version__.startswith(VLLM_VERSIONS):
        return False
    for name, make in (
        ("bgmv_shrink", _shrink),
        ("bgmv_expand", _expand),
        ("bgmv_expand_slice", _expand_slice),
    ):
        shipped = getattr(lora_ops, name)
        if not hasattr(shipped, "shipped"):
            function = make(shipped)
            function.shipped = shipped  # type: ignore[attr-defined]
            for module in (lora_ops, punica_cpu):
                setattr(module, name, function)
    return True


def product(
    inputs: torch.Tensor, weights: torch.Tensor, adapters: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor | None:
    """Multiply all tokens (tokens, in) with the matrix of their common adapter; None without one.

    Weights are (adapters, out, in) or (adapters, 1, out, in). `adapters` has each token's index, or
    as many as requests are sampled: for the log-probabilities of a prompt, vLLM passes the head all
    tokens of the prompt. Its own functions fail on that.
    """
    if not len(adapters) or not bool((adapters == adapters[0]).all()):
        return None
    first = int(adapters[0])
    matrix = weights[first].reshape(weights.shape[-2:])
    return torch.nn.functional.linear(inputs.to(dtype), matrix.to(dtype))


def _shrink(shipped: Callable[..., None]) -> Callable[..., None]:
    def bgmv_shrink(x: Any, weights: Any, out: Any, adapters: Any, scaling: float = 1.0) -> None:
        result = product(x, weights, adapters, out.dtype)
        if result is None:
            shipped(x, weights, out, adapters, scaling)
        else:
            torch.mul(result, scaling, out=out[:, : result.shape[1]])

    return bgmv_shrink


def _expand(shipped: Callable[..., None]) -> Callable[..., None]:
    def bgmv_expand(x: Any, weights: Any, out: Any, adapters: Any, add_inputs: bool = True) -> None:
        result = product(x, weights, adapters, out.dtype)
        if result is None or len(result) != len(out):
            shipped(x, weights, out, adapters, add_inputs)
        else:
            _write(result, out, add_inputs)

    return bgmv_expand


def _expand_slice(shipped: Callable[..., None]) -> Callable[..., None]:
    def bgmv_expand_slice(
        x: Any, weights: Any, out: Any, adapters: Any, start: int, size: int, add: bool = True
    ) -> None:
        result = product(x, weights, adapters, out.dtype)
        if result is None or len(result) != len(out):
            shipped(x, weights, out, adapters, start, size, add)
        else:
            _write(result, out[:, start : start + size], add)

    return bgmv_expand_slice


def _write(result: torch.Tensor, out: torch.Tensor, add: bool) -> None:
    width = min(result.shape[1], out.shape[1])  # vLLM pads adapters and models differently
    into = out[:, :width]
    if add:
        into += result[:, :width]
    else:
        into.copy_(result[:, :width])
