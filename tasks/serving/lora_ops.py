"""vLLM's LoRA on a CPU, as matrix products.

vLLM 0.32 computes an adapter on CPUs by gathering its matrices once for every token, a copy of
rank x width numbers a token and layer: nearly all of a rollout's time. Tokens of one adapter share
a product here. The sums are the same, in the same number formats.
"""

from __future__ import annotations

from typing import Any

import torch


def use_matrix_products() -> None:
    """Exchange the two kernels in this process; the others of vLLM's CPU path call them."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    mine = {"bgmv_shrink": shrink, "bgmv_expand": expand, "bgmv_expand_slice": expand_slice}
    for module in (lora_ops, punica_cpu):
        for name, function in mine.items():
            setattr(module, name, function)


def products(inputs_Ti: torch.Tensor, weights: torch.Tensor, adapter_T: Any) -> torch.Tensor:
    """(T, o): each token's input times the matrix of its adapter.

    Args:
        inputs_Ti: in the number format of the result.
        weights: (adapters, o, i), or (adapters, 1, o, i).
        adapter_T: which adapter each token uses; counted from the end where negative.
    """
    matrices = weights.flatten(0, 1) if weights.dim() == 4 else weights
    first = int(adapter_T[0])
    if bool((adapter_T == first).all()):
        return torch.nn.functional.linear(inputs_Ti, matrices[first].to(inputs_Ti.dtype))
    out = inputs_Ti.new_empty(len(inputs_Ti), matrices.shape[1])
    for one in adapter_T.unique().tolist():
        mask = adapter_T == one
        matrix = matrices[one].to(inputs_Ti.dtype)
        out[mask] = torch.nn.functional.linear(inputs_Ti[mask], matrix)
    return out


def shrink(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    scaling: float = 1.0,
) -> None:
    """Input to rank; arguments as of vLLM's `bgmv_shrink`."""
    found = products(inputs.to(output_tensor.dtype), lora_b_weights, lora_indices_tensor)
    output_tensor[:, : found.shape[1]] = scaling * found


def expand(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    add_inputs: bool = True,
) -> None:
    """Rank to output; arguments as of vLLM's `bgmv_expand`."""
    width = output_tensor.shape[1]
    _expand(inputs, lora_b_weights, output_tensor, lora_indices_tensor, 0, width, add_inputs)


def expand_slice(
    inputs: torch.Tensor,
    lora_b_weights: torch.Tensor,
    output_tensor: torch.Tensor,
    lora_indices_tensor: torch.Tensor,
    slice_offset: int,
    slice_size: int,
    add_inputs: bool = True,
) -> None:
    """Rank to a part of the output; arguments as of vLLM's `bgmv_expand_slice`."""
    _expand(
        inputs, lora_b_weights, output_tensor, lora_indices_tensor, slice_offset, slice_size,
        add_inputs,
    )  # fmt: skip


def _expand(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    output: torch.Tensor,
    adapters: torch.Tensor,
    offset: int,
    size: int,
    add: bool,
) -> None:
    found = products(inputs.to(output.dtype), weights, adapters)
    rows = 1 if len(found) == 1 else len(output)
    width = min(found.shape[1], size)  # adapter and model may be padded differently
    into = output[:rows, offset : offset + width]
    if add:
        into += found[:rows, :width]
    else:
        into.copy_(found[:rows, :width])
