"""The policy as full weights, one tensor at a time, by their keys on disk.

With full fine-tuning these are the trained parameters. Modules and rows that an adapter trains in
full take the place of the base's. A layer with an adapter gives W' = W + s B A, or with DoRA
(arXiv:2402.09353, eq. 5) W' = m (W + s B A) / ||W + s B A|| with the norm of each row, computed in
fp32 and rounded once without bias (`weights/rounding.py`), so that the engine samples from all that
was trained. A 4-bit weight is dequantised. Experts that disk stores one by one are parts of a
tensor in memory, which only full fine-tuning trains here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from tasks.core.contract import judge, require
from tasks.core.errors import ConfigError
from tasks.training.engine.partitions import SAFETENSORS_DTYPES, whole
from tasks.training.model.adapter import ADAPTER
from tasks.training.model.packed_model import model_of
from tasks.weights.mapping import Slot
from tasks.weights.model import Model
from tasks.weights.rounding import row_keys, unbiased

_OF_ADAPTERS = ("lora_", "original_module", "trainable_tokens_")


class TensorSpec(NamedTuple):
    """Shape and dtype (safetensors name) of a tensor."""

    shape: tuple[int, ...]
    dtype: str


def merged_tensors(module: nn.Module, facts: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a checkpoint of the policy by its key on disk, tied ones too.

    The module is a transformers model, or peft's around one; the facts are of its base. Under
    ZeRO-3 all ranks have to iterate together. A tensor is on the model's device, and the caller may
    keep it. Raises ConfigError for a model family whose tensors on disk are not those in memory,
    and ContractError after the last tensor, if they are not those that the model class needs.
    """
    model, yielded = model_of(module), dict[str, TensorSpec]()
    slots = defaultdict[str, list[Slot]](list)
    for slot in facts.slots:
        slots[slot.live].append(slot)
        if not slot.is_renamed and (model is not module or not slot.whole):
            raise _unmatched(slot.key)
    if facts.findings:
        raise _unmatched(facts.findings[0])
    stored = {name: buffer for name, buffer in model.named_buffers() if name in slots}
    for name, parameter in [*model.named_parameters(remove_duplicate=False), *stored.items()]:
        if (plain := _plain(name)) is not None:
            tensor = _merged(model, name, plain, parameter)
            shape = tuple(tensor.shape)
            for slot in slots[plain] or [
                Slot(facts.aliases.get(plain, plain), shape, plain, shape)
            ]:
                part = tensor if slot.is_renamed else _part(tensor, slot)
                yielded[slot.key] = TensorSpec(tuple(part.shape), SAFETENSORS_DTYPES[part.dtype])
                yield slot.key, part
    wanted = {expected.name: expected for expected in facts.tensors}
    wanted |= {alias: replace(wanted[to], name=alias) for alias, to in facts.tied.items()}
    require(judge(wanted.values(), yielded), stage="weight sync")


def _unmatched(key: str) -> ConfigError:
    return ConfigError(
        f"{key}: full weights can be synced to vLLM only for model families whose tensors on disk "
        "are those in memory, or with peft=none parts of them",
        hint="peft=lora, on linear layers alone",
    )


def _part(tensor: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return the tensor on disk that is this part of a tensor in memory."""
    part = tensor.flatten()[slot.start : slot.start + prod(slot.shape)]
    if not slot.transpose:
        return part.view(slot.shape)
    *stack, rows, columns = slot.shape
    return part.view(*stack, columns, rows).transpose(-1, -2).contiguous()


def _plain(name: str) -> str | None:
    """Return a parameter's name in the base model; None for one that is not a tensor of it."""
    parts = name.split(".")
    if any(part.startswith(_OF_ADAPTERS) for part in parts):
        return None
    if "modules_to_save" in parts:  # the trained copy of a module, for each adapter
        at = parts.index("modules_to_save")
        return None if parts[at + 1] != ADAPTER else ".".join(parts[:at] + parts[at + 2 :])
    return ".".join(part for part in parts if part not in ("base_layer", "token_adapter"))


def _merged(model: nn.Module, name: str, plain: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the policy; `name` and `plain` name it in peft's model and in the base."""
    owner, _, leaf = name.rpartition(".")
    layer: Any = model.get_submodule(owner.removesuffix(".base_layer")) if owner else model
    adapted = {*getattr(layer, "lora_A", ()), *getattr(layer, "lora_embedding_A", ())}
    if leaf == "weight" and ADAPTER in adapted:
        return _merged_weight(layer, plain)
    trained = getattr(layer, "trainable_tokens_delta", {})
    rows = [trained[ADAPTER]] if ADAPTER in trained else []
    with whole([parameter, *rows]), torch.no_grad():
        tensor = _dense(parameter).detach().clone()
        for row in rows:
            tensor[layer.token_indices[ADAPTER]] = row.to(tensor)
    return tensor


def _merged_weight(layer: Any, name: str) -> torch.Tensor:
    """Return W' in the base's dtype, rounded as a merge on disk rounds it."""
    weight, scale = layer.get_base_layer().weight, layer.scaling[ADAPTER]
    if ADAPTER in layer.lora_A:
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    else:  # an embedding, whose matrices are transposed
        a, b = layer.lora_embedding_A[ADAPTER], layer.lora_embedding_B[ADAPTER]
    magnitudes = layer.lora_magnitude_vector
    magnitude = magnitudes[ADAPTER].weight if ADAPTER in magnitudes else None
    parts = [weight, a, b] if magnitude is None else [weight, a, b, magnitude]
    with whole(parts), torch.no_grad():
        base = _dense(weight)
        wide = base.float()
        left, right = (b, a) if ADAPTER in layer.lora_A else (a.t(), b.t())
        merged = torch.addmm(wide, left.float(), right.float(), alpha=scale)
        if magnitude is not None:
            merged *= (magnitude.float() / merged.norm(dim=1))[:, None]
        if base.dtype == torch.float32:
            return merged
        return unbiased(merged, wide, base.dtype, row_keys(name, 0, len(merged)))


def _dense(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's values; a 4-bit parameter is dequantised as its layer does."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state)
