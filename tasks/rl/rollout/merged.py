"""The policy as full weights, one tensor at a time, by their keys on disk.

With full fine-tuning these are the trained parameters. A layer with an adapter gives
W' = W + s B A, or with DoRA (arXiv:2402.09353, eq. 5) W' = m (W + s B A) / ||W + s B A|| with the
norm of each row, computed in fp32 and rounded once without bias (`weights/rounding.py`), so that
the engine samples from all that was trained. A 4-bit weight is dequantised.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tasks.core.contract import Expected, judge, require
from tasks.core.errors import ConfigError
from tasks.rl.rollout.policy_sync import TensorSpec
from tasks.rl.rollout.vllm_support import NATIVE
from tasks.training.engine.partitions import SAFETENSORS_DTYPES
from tasks.training.model.adapter import ADAPTER
from tasks.training.model.gather_params import whole
from tasks.training.model.packed_model import model_of
from tasks.weights.plan.contracts import ModelFacts
from tasks.weights.rounding import row_keys, unbiased

SHARD = 2 << 30
"""Bytes after which `write_merged` begins another file."""


def merged_tensors(module: nn.Module, facts: ModelFacts) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a checkpoint of the policy, a tied head under its own key too.

    Under ZeRO-3 all ranks have to iterate together.

    Args:
        module: module of the DeepSpeed engine: a transformers model, or peft's around one.
        facts: of its base.

    Yields:
        Key on disk, and the tensor on the model's device; the caller may keep it.

    Raises:
        ConfigError: a model family whose tensors on disk are not those in memory.
        ContractError: after the last tensor, if they are not those that the model class needs.
    """
    keys = disk_keys(facts)
    model = model_of(module)
    layers = dict(adapted_layers(model))
    yielded: dict[str, TensorSpec] = {}
    for name, parameter in model.named_parameters():
        plain = _plain(name)
        if plain is None:
            continue
        owner, _, leaf = plain.rpartition(".")
        layer = layers.get(owner)
        if layer is not None and leaf == "weight":
            tensor = _merged_weight(layer, plain)
        else:
            with whole([parameter]):
                tensor = _dense(parameter).detach().clone()
        for key in keys.get(plain, [plain]):
            yielded[key] = TensorSpec(tuple(tensor.shape), SAFETENSORS_DTYPES[tensor.dtype])
            yield key, tensor
    require(judge(_contract(facts), yielded), stage="weight sync")


def write_merged(module: nn.Module, facts: ModelFacts, folder: Path | None, *, base: Path) -> int:
    """Write the policy as a checkpoint with the base's config.json. All ranks take part.

    Args:
        module: as of `merged_tensors`.
        facts: of its base.
        folder: existing folder; None on ranks that do not write.
        base: folder of the base.

    Returns:
        Number of tensors.

    Raises:
        ConfigError: as `merged_tensors`.
        ContractError: as `merged_tensors`; nothing must be loaded from the folder then.
    """
    shard: dict[str, torch.Tensor] = {}
    count = written = size = 0

    def save() -> None:
        nonlocal written, size
        if folder is not None and shard:
            save_file(shard, folder / f"model-{written:05d}.safetensors")
        written, size = written + 1, 0
        shard.clear()

    for key, tensor in merged_tensors(module, facts):
        count += 1
        if folder is not None:
            shard[key] = tensor.cpu().clone().contiguous()
            size += tensor.nbytes
        if size > SHARD:
            save()
    save()
    if folder is not None:
        shutil.copy(base / "config.json", folder)
    return count


def disk_keys(facts: ModelFacts) -> Mapping[str, list[str]]:
    """Return the keys on disk of every parameter in memory: its own, and those tied to it.

    Raises:
        ConfigError: tensors on disk and in memory are not one to one.
    """
    unmatched = [place.disk for place in facts.places if not place.is_all or place.transpose]
    if unmatched or facts.findings:
        raise ConfigError(
            f"{(unmatched or list(facts.findings))[0]}: full weights can be synced to vLLM only "
            "for model families whose tensors in memory are those on disk",
            hint=f"peft=lora, or {NATIVE}",
        )
    keys = {place.live: [place.disk] for place in facts.places}
    for alias, holder in facts.live.tied.items():
        if facts.aliases[alias] not in keys.get(holder, []):
            keys.setdefault(holder, []).append(facts.aliases[alias])
    return keys


def _contract(facts: ModelFacts) -> list[Expected]:
    """Return a checkpoint's tensors, tied ones under each of their keys."""
    by_name = {expected.name: expected for expected in facts.tensors}
    tied = [replace(by_name[to], name=alias) for alias, to in facts.tied.items()]
    return [*by_name.values(), *tied]


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the layers with the policy's adapter, by the name of the base layer."""
    from peft.tuners.lora import LoraLayer

    for name, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and ADAPTER in layer.lora_A:
            yield name, layer


def _plain(name: str) -> str | None:
    """Return a parameter's name in the base model; None for a parameter of an adapter."""
    parts = name.split(".")
    if any(part.startswith("lora_") for part in parts):
        return None
    return ".".join(part for part in parts if part != "base_layer")


def _merged_weight(layer: Any, name: str) -> torch.Tensor:
    """Return W' in the base's dtype, rounded as a merge on disk rounds it."""
    a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
    weight, scale = layer.get_base_layer().weight, layer.scaling[ADAPTER]
    magnitudes = layer.lora_magnitude_vector
    magnitude = magnitudes[ADAPTER].weight if ADAPTER in magnitudes else None
    parts = [weight, a, b] if magnitude is None else [weight, a, b, magnitude]
    with whole(parts), torch.no_grad():
        base = _dense(weight)
        wide = base.float()
        merged = torch.addmm(wide, b.float(), a.float(), alpha=scale)
        if magnitude is not None:
            merged *= (magnitude.float() / merged.norm(dim=1))[:, None]
        if base.dtype == torch.float32:
            return merged
        return unbiased(merged, wide, base.dtype, row_keys(name, 0, len(merged)))


def _dense(parameter: nn.Parameter) -> torch.Tensor:
    """Return a parameter's values; a 4-bit parameter is dequantised as its layer does."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.data, state)
