"""Compare the weights in vLLM's worker with those that were sent to it.

A version number alone proves nothing: an engine can accept weights and keep the old ones, bind an
adapter to no layer, or reload its base when it wakes. After each sync:

    an adapter     is compared number by number with every slot that vLLM filled from it
    full weights   are compared by some columns of every matrix (different ones for each version)
                   and by every vector. A packed matrix on a CPU gives a column as its product with
                   a unit vector, which is exact.

Before each request, the same values are read again and must not have changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from tasks.core.errors import TrainingError, first_and_more
from tasks.serving.vllm.loaded_adapter import (
    adapter_differences,
    adapters_of_batch,
    difference,
    slot_sums,
)

COLUMNS = 8
"""Number of columns of each matrix that are compared."""
Tensors = dict[str, torch.Tensor]


class LoadedWeights:
    """Check that one engine computes with the weights that were last sent to it.

    Args:
        llm: `vllm.LLM` whose worker lives in this process.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._version = 0
        self._sums: dict[str, float] = {}
        self._columns: Tensors = {}

    def require_adapter(self, folder: Path, version: int) -> None:
        """Compare the adapter in vLLM's slots with the PEFT folder that was sent.

        Args:
            folder: the PEFT folder.
            version: of the policy, which is the adapter's id in vLLM.

        Raises:
            TrainingError: a tensor that no layer uses, or other numbers; details name each.
        """
        _require_none(self._ask(adapter_differences, folder, version), version)
        if not self._version:
            self._columns = self._ask(read_columns, 0)
        self._sums = self._ask(slot_sums, version)
        self._version = version

    def recorded(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, sent: Tensors
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the full weights unchanged, and put the columns to compare into `sent`.

        Args:
            tensors: key on disk and tensor.
            version: of the policy; it selects the columns.
            sent: filled with the columns of each matrix, and with the vectors, by key.
        """
        for key, tensor in tensors:
            sent[key] = _some_columns(tensor.detach(), version)
            yield key, tensor

    def require_weights(self, sent: Tensors, version: int) -> None:
        """Compare vLLM's weights with those of `recorded`.

        Raises:
            TrainingError: a tensor that no layer uses, or other numbers; details name each.
        """
        columns = self._ask(read_columns, version)
        _require_none(self._ask(_weight_differences, columns, sent, version), version)
        self._columns, self._version = columns, version

    def require_unchanged(self) -> None:
        """Compare vLLM's weights with what they were after the last sync.

        Raises:
            TrainingError: they have changed; details name the layers.
        """
        if not self._version:
            return
        adapter = bool(self._sums)
        columns = self._ask(read_columns, 0 if adapter else self._version)
        wrong = [
            difference(name, columns[name], expected)
            for name, expected in self._columns.items()
            if not torch.equal(columns[name], expected)
        ]
        if adapter:
            sums = self._ask(slot_sums, self._version)
            wrong += [
                f"{name}: the adapter's numbers sum to {sums.get(name, 0.0):.6g} but summed "
                f"to {expected:.6g}"
                for name, expected in self._sums.items()
                if not math.isclose(sums.get(name, 0.0), expected, rel_tol=1e-9, abs_tol=1e-9)
            ]
        if wrong:
            raise TrainingError(
                f"vLLM's weights have changed since version {self._version} of the policy was "
                f"synced, as after a wake that loads the base again: {first_and_more(wrong)}",
                details=wrong[:20],
            )

    def require_used(self) -> None:
        """Check that every sequence of the worker's last batch used the synced adapter.

        Raises:
            TrainingError: the base or another adapter generated some of the responses.
        """
        if not self._sums:
            return
        used = self._ask(adapters_of_batch)
        if used - {self._version}:
            raise TrainingError(
                f"vLLM answered with adapters {sorted(used)} (0: the base alone) instead of "
                f"version {self._version} of the policy"
            )

    def _ask(self, work: Any, *args: Any) -> Any:
        with torch.no_grad():
            return self._llm.collective_rpc(work, args=args)[0]


def _require_none(wrong: list[str], version: int) -> None:
    if wrong:
        raise TrainingError(
            f"vLLM does not compute with version {version} of the policy, which was just "
            f"synced: {first_and_more(wrong)}",
            details=wrong[:20],
        )


def _some_columns(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """Return a copy: some columns of a matrix, shape (o, `COLUMNS`), or a whole vector."""
    if tensor.dim() < 2:
        return tensor.clone()
    return tensor[..., columns_of(tensor.shape[-1], version).to(tensor.device)].clone()


def columns_of(width: int, version: int) -> torch.Tensor:
    """Return the indices of the columns to compare; successive versions cycle through all."""
    if width <= COLUMNS:
        return torch.arange(width)
    apart = width // COLUMNS
    return torch.arange(COLUMNS) * apart + version % apart


def read_columns(worker: Any, version: int) -> Tensors:
    """Return the compared columns of the matrices, and the vectors, of the worker's model."""
    return {
        f"{name}.{leaf}": tensor
        for name, layer in _layers(worker.get_model())
        for leaf, tensor in _layer_columns(layer, version)
    }


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield modules with parameters of their own; a layer with an adapter under its plain name."""
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield name.removesuffix(".base_layer"), module


def _layer_columns(layer: Any, version: int) -> Iterator[tuple[str, torch.Tensor]]:
    packed = hasattr(layer, "cpu_linear")  # then `weight` may be empty or unused
    for leaf, parameter in layer.named_parameters(recurse=False):
        if leaf == "weight" and packed:
            local = _local_columns(layer, version)
            one_hot = torch.zeros(len(local), _width(layer), dtype=parameter.dtype)
            one_hot[torch.arange(len(local)), local] = 1
            yield leaf, layer.quant_method.apply(layer, one_hot, None).t()
        elif leaf == "weight" and parameter.dim() == 2:
            yield leaf, parameter[:, _local_columns(layer, version).to(parameter.device)]
        else:
            yield leaf, _some_columns(parameter, version)


def _width(layer: Any) -> int:
    """Return the number of inputs of this rank's shard of a layer."""
    for name in ("input_size_per_partition", "input_size", "embedding_dim"):
        if hasattr(layer, name):
            return int(getattr(layer, name))
    return int(layer.weight.shape[-1])


def _local_columns(layer: Any, version: int) -> torch.Tensor:
    """Return the compared columns in this rank's shard, as indices within the shard."""
    width = _width(layer)
    full = int(getattr(layer, "input_size", width))
    first = int(layer.tp_rank) * width if full > width else 0
    columns = columns_of(full, version)
    return columns[(columns >= first) & (columns < first + width)] - first


def _weight_differences(worker: Any, columns: Tensors, sent: Tensors, version: int) -> list[str]:
    """Return a line for every sent tensor that differs from the model's weights."""
    model = worker.get_model()
    fused: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    named = {_engine_name(model, key): key for key in sent}
    left, wrong = dict(named), []
    for owner, layer in _layers(model):
        above, _, last = owner.rpartition(".")
        prefix = f"{above}." if above else ""
        for leaf, _ in layer.named_parameters(recurse=False):
            rows, begin = columns[f"{owner}.{leaf}"], 0
            names = [f"{prefix}{part}.{leaf}" for part in fused.get(last, [])]
            names = names if names and names[0] in named else [f"{owner}.{leaf}"]
            if not set(names) & set(named):  # after a sleep or dummy load its values are random
                wrong.append(f"{owner}.{leaf}: nothing was sent for it")
            for number, key in enumerate(left.pop(name, None) for name in names):
                if key is None:
                    continue
                part = _part_of(layer, number, sent[key], version)
                loaded = rows[begin : begin + len(part)].to(part.dtype)  # a CPU's bias may be fp32
                begin += len(part)
                if not torch.equal(loaded, part):
                    wrong.append(difference(key, loaded, part))
    if len(left) == len(named):
        return [f"none of the {len(named)} tensors is bound to a layer"]
    return wrong + [f"{key}: bound to no layer of vLLM's model" for key in left.values()]


def _engine_name(model: Any, key: str) -> str:
    """Return vLLM's name of a tensor on disk, before layers are fused."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    name = None if mapper is None else mapper.get_rename_mapper().map_name(key)
    return key if name is None else str(name)


def _part_of(layer: Any, number: int, sent: torch.Tensor, version: int) -> torch.Tensor:
    """Return this rank's shard of a tensor's columns (a layer is split by rows or by columns)."""
    shards = getattr(layer, "shard_indices", None)
    if shards is not None:
        return sent[shards.org_vocab_start_index : shards.org_vocab_end_index]
    rank = int(getattr(layer, "tp_rank", 0))
    sizes = getattr(layer, "output_partition_sizes", None)
    if sizes is not None and sum(sizes) < int(layer.output_size):
        replicas = getattr(layer, "num_kv_head_replicas", 1) if number else 1
        return sent.split(sizes[number])[rank // replicas]
    full = int(getattr(layer, "input_size", 0))
    if sent.dim() == 2 and full > _width(layer):
        columns, width = columns_of(full, version), _width(layer)
        return sent[:, (columns >= rank * width) & (columns < (rank + 1) * width)]
    return sent
