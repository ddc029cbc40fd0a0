"""List the modules of a model by name, and the weights that each of them computes with.

Names are those of the plain model: wrappers and adapters leave no trace in them. A layer with an
unmerged adapter is one module, whose weight is the base's plus the adapter's change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tasks.weights.files.names import PEFT_PREFIX, unwrap

Weights = dict[str, torch.Tensor]


def places(model: Any) -> dict[str, Any]:
    """Return the modules to compare by name: those with weights of their own, and the smallest.

    Args:
        model: a model by transformers, perhaps with an adapter by peft.
    """
    listed: dict[str, Any] = {}
    _collect(model, "", listed)
    return listed


def _collect(module: Any, name: str, listed: dict[str, Any]) -> None:
    children = [] if _is_adapted(module) else list(module.named_children())
    own = next(module.parameters(recurse=False), None) is not None
    if own or not children:
        listed[_plain(name)] = module
    for child, below in children:
        _collect(below, f"{name}.{child}" if name else child, listed)


def _plain(name: str) -> str:
    return unwrap(name.removeprefix(PEFT_PREFIX))


def _is_adapted(module: Any) -> bool:
    """Return True for a layer that peft has wrapped."""
    # Not by hasattr: peft's model as a whole passes attributes on, and has modules_to_save too.
    return bool({"base_layer", "modules_to_save"} & module._modules.keys())


def weights_of(module: Any) -> Weights:
    """Return the weights that a module computes with, by name.

    Tensors of a quantised layer whose values cannot be read are left out.
    """
    if hasattr(module, "modules_to_save"):
        active = module.active_adapters[0]
        chosen = module.modules_to_save
        return weights_of(chosen[active] if active in list(chosen) else module.original_module)
    if hasattr(module, "base_layer"):
        return _adapted(module)
    listed = {name: _readable(tensor) for name, tensor in module.named_parameters(recurse=False)}
    temporary = module._non_persistent_buffers_set
    for name, tensor in module.named_buffers(recurse=False):
        if name not in temporary:
            listed[name] = tensor
    scale = listed.pop("weight_scale", None)
    listed.pop("input_scale", None)
    weight = listed.get("weight")
    if scale is not None and weight is not None:  # float8 or int8 of compressed-tensors
        listed["weight"] = weight.float() * scale.float()
    return {
        name: tensor
        for name, tensor in listed.items()
        if tensor is not None and (tensor.is_floating_point() or tensor.dtype == torch.bool)
    }


def _readable(parameter: Any) -> Any:
    """Return a parameter's values; a 4-bit one of bitsandbytes dequantised; else None if packed."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state)


@torch.no_grad()
def _adapted(module: Any) -> Weights:
    """Return the weights of a layer with LoRA factors: base and change added in float32."""
    listed = weights_of(module.base_layer)
    change = getattr(module, "get_delta_weight", None)
    if change is None or getattr(module, "disable_adapters", False):
        return listed
    key = getattr(module, "parameter_name", "weight")  # of a layer that has several, as experts
    for adapter in module.active_adapters:
        factors = [*getattr(module, "lora_A", ()), *getattr(module, "lora_embedding_A", ())]
        if key in listed and adapter in factors:
            with _factors_in_float32(module):  # peft rounds the change to the factors' dtype
                listed[key] = listed[key].float() + change(adapter).float()
    return listed


@contextmanager
def _factors_in_float32(module: Any) -> Iterator[None]:
    factors = [each for name, each in module.named_parameters() if "lora_" in name]
    stored = [factor.data for factor in factors]
    for factor in factors:
        factor.data = factor.data.float()
    try:
        yield
    finally:
        for factor, data in zip(factors, stored, strict=True):
            factor.data = data
