"""Compare the adapter in a vLLM worker's slots with the PEFT folder that was sent to it.

A version number alone proves nothing: an engine can bind an adapter to no layer, keep the old one,
or lose it when it wakes. vLLM scales lora_B, fuses q, k, v and gate, up, pads to its largest rank,
and keeps the result in one slot per adapter and layer. After each sync every slot is compared
number by number; before each request, a sample of slots and base is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tasks.core.errors import TrainingError, first_and_more
from tasks.weights.lora_config import parse_config

SAMPLED = 1024
"""Numbers of each tensor that are compared before each request."""


class LoadedAdapter:
    """Checks that an engine in this process computes with the adapter that was last sent to it."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._version = 0
        self._sample: dict[str, torch.Tensor] = {}

    def require_sent(self, folder: Path, version: int) -> None:
        """Compare the slots with the PEFT folder that was sent.

        Raises TrainingError for a tensor that no layer uses and for other numbers.
        """
        self._version = version
        self._require_none(
            "its adapter is another", self._ask(adapter_differences, folder, version)
        )
        self._sample = self._ask(sample, version)

    def require_unchanged(self) -> None:
        """Compare adapter and base with what they were after the sync; raise TrainingError."""
        now = self._ask(sample, self._version) if self._version else {}
        wrong = [
            difference(name, now.get(name, torch.zeros_like(sent)), sent)
            for name, sent in self._sample.items()
            if name not in now or not torch.equal(now[name], sent)
        ]
        self._require_none("its weights have changed since, as after a wake", wrong)

    def require_used(self) -> None:
        """Raise TrainingError if a sequence of the last batch did not use the synced adapter."""
        used = self._ask(adapters_of_batch) if self._version else set()
        others = [f"adapters {sorted(used)} (0: the base alone)"] if used - {self._version} else []
        self._require_none("it answered with others", others)

    def _require_none(self, what: str, wrong: Sequence[str]) -> None:
        if wrong:
            raise TrainingError(
                f"vLLM does not sample from version {self._version} of the policy, which was "
                f"synced: {what}: {first_and_more(wrong)}",
                details=wrong[:20],
            )

    def _ask(self, work: Any, *args: Any) -> Any:
        with torch.no_grad():
            return self._llm.collective_rpc(work, args=args)[0]


def sample(worker: Any, version: int) -> dict[str, torch.Tensor]:
    """Return up to `SAMPLED` numbers, evenly spaced, of each tensor of base and adapter."""
    tensors = dict(worker.get_model().named_parameters())
    manager = worker.model_runner.lora_manager._adapter_manager
    if version in manager.lora_index_to_id:
        slot = manager.lora_index_to_id.index(version)
        for name, layer, _ in _slots(manager):
            for which, stacks in (("A", layer.lora_a_stacked), ("B", layer.lora_b_stacked)):
                for number, stack in enumerate(stacks):
                    tensors[f"{name}.lora_{which}.{number}"] = stack[slot]
    flat = {name: tensor.detach().reshape(-1) for name, tensor in tensors.items()}
    return {name: each[:: max(1, len(each) // SAMPLED)].clone() for name, each in flat.items()}


def adapter_differences(worker: Any, folder: Path, version: int) -> list[str]:
    """Return a line for every adapter tensor that differs from the one in vLLM's layers."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    manager = worker.model_runner.lora_manager._adapter_manager
    if version not in manager.lora_index_to_id:
        return [f"no slot has adapter {version}: {manager.lora_index_to_id}"]
    slot, wrong, any_bound = manager.lora_index_to_id.index(version), [], False
    config, _ = parse_config(json.loads((folder / "adapter_config.json").read_text()))
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    mapper = None if mapper is None else mapper.get_rename_mapper()
    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        keys = {(*parse_fine_tuned_lora_name(key, mapper), key) for key in file.keys()}  # noqa: SIM118
        known = {(name, is_a): key for name, is_a, key in keys}
        unbound = dict(known)
        rows = {n: file.get_slice(key).get_shape()[0] for (n, a), key in known.items() if not a}
        for layer, number, part, is_a, stack, span in _halves(manager, rows):
            loaded, key = stack[slot, 0], known.get((part, is_a))
            unbound.pop((part, is_a), None)
            if key is None:
                if loaded.any():
                    wrong.append(f"{part}: not in the adapter, and not zero in vLLM's layer")
                continue
            tensor = file.get_tensor(key)[slice(None) if is_a else span].to(loaded.dtype)
            scale = 1.0 if is_a else config.scale_of(parse_fine_tuned_lora_name(key)[0])
            tensor = tensor if scale == 1.0 else tensor * scale  # vLLM's own rounding
            sent = _padded(_sliced(layer, number, tensor, is_a).to(loaded.device), loaded)
            any_bound = any_bound or bool(loaded.any())
            if not torch.equal(loaded, sent):
                wrong.append(difference(key, loaded, sent))
    if wrong + list(unbound.values()) and not any_bound:
        return [f"none of the {len(known)} tensors is bound to a layer: the base alone answers"]
    return wrong + [f"{key}: bound to no layer of vLLM's model" for key in unbound.values()]


def _slots(manager: Any) -> Iterator[tuple[str, Any, list[str]]]:
    """Yield every layer with adapter slots: name, layer, names of the plain layers fused in it."""
    for name, layer in manager.modules.items():
        parts = manager.packed_modules.get(name, [name])
        if len(getattr(layer, "lora_a_stacked", ())) >= len(parts):
            yield name, layer, parts


def _halves(
    manager: Any, rows: dict[str, int]
) -> Iterator[tuple[Any, int, str, bool, torch.Tensor, slice]]:
    """Yield (layer, number of its slot, plain layer, True for lora_A, slots, rows of lora_B).

    A layer may have more slots than plain layers: `in_proj_qkv` of linear attention fills three.
    """
    for _, layer, parts in _slots(manager):
        spans = [(part, slice(None)) for part in parts]
        if len(layer.lora_a_stacked) > len(parts):
            sizes, spans = iter(layer.output_sizes), []
            for part in parts:
                at = 0
                while at < rows.get(part, 0):
                    start, at = at, at + next(sizes)
                    spans.append((part, slice(start, at)))
        for number, (part, span) in enumerate(spans):
            yield layer, number, part, True, layer.lora_a_stacked[number], span
            yield layer, number, part, False, layer.lora_b_stacked[number], span


def _padded(sent: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Pad a tensor of a smaller rank with zeros, as vLLM does."""
    whole = torch.zeros_like(like)
    whole[: sent.shape[0], : sent.shape[1]] = sent
    return whole


def _sliced(layer: Any, number: int, tensor: torch.Tensor, is_a: bool) -> torch.Tensor:
    """Return this rank's shard of a tensor under tensor parallelism, by vLLM's own rule."""
    if getattr(layer, "tp_size", 1) == 1:
        return tensor
    slice_ = layer.slice_lora_a if is_a else layer.slice_lora_b
    count = len(layer.lora_a_stacked)
    if count == 1:
        return slice_(tensor)
    return slice_([tensor if n == number else None for n in range(count)])[number]


def adapters_of_batch(worker: Any) -> set[int]:
    """Return the ids of the adapters in the worker's last batch; 0 is the base alone."""
    mapping = worker.model_runner.lora_manager._adapter_manager._last_mapping
    return {0} if mapping is None else set(mapping.prompt_mapping)


def difference(name: str, loaded: torch.Tensor, wanted: torch.Tensor) -> str:
    """Describe the difference between a tensor and the one that was sent."""
    apart = (loaded.double() - wanted.double()).abs()
    return (
        f"{name}: {int((apart > 0).sum())} of {apart.numel()} numbers differ, "
        f"by {float(apart.max()):.3g} at most"
    )
