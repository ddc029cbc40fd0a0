"""The policy as whole weights, one tensor at a time, by their keys on disk.

For full fine-tuning these are the trained parameters; of DoRA (arXiv:2402.09353, eq. 5) and of
pairs on the same layer, W' = m (W + s B A) / ||W + s B A|| with the norm of each row, computed in
fp32 and rounded once. A 4-bit weight is what it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tasks.core.contract import Expected, judge, require
from tasks.core.errors import ConfigError
from tasks.rl.rollout.tensor_spec import Held
from tasks.rl.rollout.vllm_support import NATIVE
from tasks.training.engine.partitions import SAFETENSORS_DTYPES
from tasks.training.model.fused_lora import ADAPTER
from tasks.training.model.gather_params import whole
from tasks.training.model.packed_model import model_of
from tasks.weights.plan.contracts import ModelFacts


def merged_tensors(module: nn.Module, facts: ModelFacts) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint of the policy, the head included where it is tied.

    Under ZeRO-3 all ranks have to go through it together.

    Args:
        module: DeepSpeed's engine's: a transformers model, or peft's around one.
        facts: of its base.

    Yields:
        Key on disk, and the tensor on the model's device; it may be kept.

    Raises:
        ConfigError: a family whose tensors on disk are not those in memory.
        ContractError: they are not all that the base's class asks for; after the last of them.
    """
    keys = disk_keys(facts)
    model = model_of(module)
    layers = dict(adapted(model))
    given: dict[str, Held] = {}
    for name, parameter in model.named_parameters():
        plain = _plain(name)
        if plain is None:
            continue
        owner, _, leaf = plain.rpartition(".")
        layer = layers.get(owner)
        if layer is not None and leaf == "weight":
            tensor = _merged(layer)
        else:
            with whole([parameter]):
                tensor = _dense(parameter).detach().clone()
        for key in keys.get(plain, [plain]):
            given[key] = Held(tuple(tensor.shape), SAFETENSORS_DTYPES[tensor.dtype])
            yield key, tensor
    require(judge(_contract(facts), given), stage="policy hand-off")


def disk_keys(facts: ModelFacts) -> Mapping[str, list[str]]:
    """Keys on disk of every parameter in memory: its own, and those that are tied to it.

    Raises:
        ConfigError: tensors that are not one to one.
    """
    mixed = [one.disk for one in facts.places if not one.is_all or one.transpose]
    if mixed or facts.findings:
        raise ConfigError(
            f"{(mixed or list(facts.findings))[0]}: vLLM is handed whole weights only of families "
            "whose tensors in memory are those on disk",
            hint=f"peft=lora, or {NATIVE}",
        )
    found = {one.live: [one.disk] for one in facts.places}
    for alias, holder in facts.live.tied.items():
        if facts.aliases[alias] not in found.get(holder, []):
            found.setdefault(holder, []).append(facts.aliases[alias])
    return found


def _contract(facts: ModelFacts) -> list[Expected]:
    """A checkpoint's tensors, tied ones under each of their keys."""
    held = {one.name: one for one in facts.tensors}
    tied = [replace(held[to], name=alias) for alias, to in facts.tied.items()]
    return [*held.values(), *tied]


def adapted(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Layers with the policy's adapter, by the name of the layer below it."""
    from peft.tuners.lora import LoraLayer

    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and ADAPTER in layer.lora_A:
            yield name, layer


def _plain(name: str) -> str | None:
    """The model's own name of a parameter; None for an adapter's."""
    parts = name.split(".")
    if any(part.startswith("lora_") for part in parts):
        return None
    return ".".join(part for part in parts if part != "base_layer")


def _merged(layer: Any) -> torch.Tensor:
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    weight, scale = layer.get_base_layer().weight, layer.scaling[ADAPTER]
    magnitudes = layer.lora_magnitude_vector
    magnitude = magnitudes[ADAPTER].weight if ADAPTER in magnitudes else None
    parts = [weight, a, b] if magnitude is None else [weight, a, b, magnitude]
    with whole(parts), torch.no_grad():
        base = _dense(weight)
        together = torch.addmm(base.float(), b.float(), a.float(), alpha=scale)
        if magnitude is not None:
            together *= (magnitude.float() / together.norm(dim=1))[:, None]
        return together.to(base.dtype)


def _dense(parameter: nn.Parameter) -> torch.Tensor:
    """A parameter's values; a 4-bit one's as its layer multiplies with them."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state)
