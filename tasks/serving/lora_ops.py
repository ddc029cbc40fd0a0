"""vLLM's LoRA on a CPU.

vLLM 0.32 computes an adapter on CPUs by gathering its matrices once for every token, a copy of
rank x width numbers a token and layer: nearly all of a rollout's time. Here

    one adapter for every token     as in rollouts: a layer is one call of a kernel (`native/`);
                                    nothing is computed for what the adapter does not train
    several, or no kernel           a product for each adapter's tokens, by vLLM's own way through
                                    its kernels

The sums are the same. What lies between the two products of one adapter has the number format of
the model, as on a GPU, and so has what is added to a layer's output, as in training.
"""

from __future__ import annotations

from typing import Any

import torch

from tasks.serving.native.adapter import Layer, Stacked, adapter_kernel


def use_matrix_products() -> None:
    """Exchange vLLM's CPU kernels in this process, and how a layer with an adapter calls them."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    mine = {"bgmv_shrink": shrink, "bgmv_expand": expand, "bgmv_expand_slice": expand_slice}
    for module in (lora_ops, punica_cpu):
        for name, function in mine.items():
            setattr(module, name, function)
    _take_layers(punica_cpu.PunicaWrapperCPU)


def _take_layers(wrapper: Any) -> None:
    """Give vLLM's wrapper a way for tokens that all use one adapter; it is asked layer by layer."""
    if hasattr(wrapper, "only_slot"):
        return
    told, linear, logits = wrapper.update_metadata, wrapper.add_lora_linear, wrapper.add_lora_logits
    wrapper.only_slot = None

    def update_metadata(self: Any, *args: Any, **kwargs: Any) -> None:
        told(self, *args, **kwargs)
        slots = self.token_lora_indices.unique()
        self.only_slot = int(slots[0]) if len(slots) == 1 and slots[0] >= 0 else None

    def add_lora_linear(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: Stacked,
        lora_b_stacked: Stacked,
        scale: float,
        output_slices: tuple[int, ...],
        **more: Any,
    ) -> None:
        firsts, seconds = lora_a_stacked, lora_b_stacked
        if not _add_at_once(self, y, x, firsts, seconds, scale, output_slices):
            linear(self, y, x, firsts, seconds, scale, output_slices, **more)

    def add_lora_logits(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **more: Any,
    ) -> None:
        firsts, seconds = (lora_a_stacked,), (lora_b_stacked,)
        if not _add_at_once(self, y, x, firsts, seconds, scale, (y.shape[-1],)):
            logits(self, y, x, lora_a_stacked, lora_b_stacked, scale, **more)

    wrapper.update_metadata = update_metadata
    wrapper.add_lora_linear, wrapper.add_lora_logits = add_lora_linear, add_lora_logits


def _add_at_once(
    wrapper: Any,
    y: torch.Tensor,
    x: torch.Tensor,
    firsts: Stacked,
    seconds: Stacked,
    scale: float,
    widths: tuple[int, ...],
) -> bool:
    """Whether it was done, by one call of the kernel."""
    kernel = adapter_kernel()
    if kernel is None or wrapper.only_slot is None:
        return False
    # Of this engine: vLLM copies the next adapter into the same place.
    layers = wrapper.__dict__.setdefault("layers", {})
    key = (seconds[0].data_ptr(), wrapper.only_slot)
    if key not in layers:
        layers[key] = Layer.of(firsts, seconds, wrapper.only_slot, widths)
    layer, rows, to = layers[key], x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])
    if layer is None or not layer.fits(rows, to):
        return False
    kernel.add(layer, rows, to, scale)
    return True


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
