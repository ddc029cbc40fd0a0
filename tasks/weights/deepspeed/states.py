"""One rank's files, from what was pickled to types. What is not as expected is named, by file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.weights.pickled.objects import Foreign
from tasks.weights.pickled.tensors import TensorRef, TorchFile, is_shape, read_torch_file

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelState:
    """A `*model_states.pt`.

    Attributes:
        module: tensors of the state dict; under ZeRO-3 parameters are placeholders in it.
        buffers: which of them are buffers.
        groups: trainable parameters in the order of the flat groups; None without ZeRO.
        frozen: shapes of the frozen parameters; empty when they were left out.
        fragments: the frozen parameters' data: this rank's part under ZeRO-3, else whole.
        shared: name -> name of the parameter that holds the same tensor.
        step, world_size, version: as the trainer counted; None where it is not told.
    """

    file: TorchFile
    module: Mapping[str, TensorRef]
    buffers: frozenset[str]
    groups: tuple[Shapes, ...] | None
    frozen: Shapes
    fragments: Mapping[str, TensorRef]
    shared: Mapping[str, str]
    step: int | None
    world_size: int | None
    version: str | None


@dataclass(frozen=True)
class OptimState:
    """A `*optim_states.pt`: this rank's part of the fp32 weights.

    Attributes:
        stage: 1, 2 or 3.
        partitions: number of parts that the groups were cut into.
        flat: one 1-D tensor a group.
        paddings: elements that follow each parameter of each group, as unpickled; None for none.
        step: of the inner optimizer, as bytes to compare; None where it is not told.
    """

    file: TorchFile
    stage: int
    partitions: int
    flat: tuple[TensorRef, ...]
    paddings: tuple[Sequence[Any], ...] | None
    step: bytes | None


def read_model_state(path: Path) -> ModelState:
    """Read a `*model_states.pt`. Raises ArtifactError, also where the model is not whole in it."""
    file = read_torch_file(path)
    raw = _mapping(path, "the file", file.content)
    if raw.get("ds_autoep_layers") or raw.get("autoep_layers"):
        raise ArtifactError(f"{path}: expert parallel training (AutoEP), which is not read")
    if _count(raw.get("mp_world_size")) not in (None, 1):
        raise ArtifactError(f"{path}: tensor parallel training, which is not read")
    if not isinstance(raw.get("module"), dict):
        raise ArtifactError(
            f"{path}: has no module: pipeline parallel training, or not DeepSpeed's"
        )
    groups = None if raw.get("param_shapes") is None else _list(path, "param_shapes", raw)
    if len(set(map(id, groups or ()))) < len(groups or ()):  # a few bytes could ask for any memory
        raise ArtifactError(f"{path}: param_shapes holds one group twice")
    version = raw.get("ds_version")
    return ModelState(
        replace(file, content=None),  # what is needed of it stands below
        {n: v for n, v in raw["module"].items() if isinstance(n, str) and isinstance(v, TensorRef)},
        frozenset(n for n in _list(path, "buffer_names", raw) if isinstance(n, str)),
        None if groups is None else tuple(_shapes(path, "param_shapes", g) for g in groups),
        _shapes(path, "frozen_param_shapes", raw.get("frozen_param_shapes") or {}),
        _tensors(path, "frozen_param_fragments", raw.get("frozen_param_fragments") or {}),
        _names(path, "shared_params", raw.get("shared_params") or {}),
        _count(raw.get("global_steps")),
        _count(raw.get("dp_world_size")),
        version if isinstance(version, str) else None,
    )


def read_optim_state(path: Path) -> OptimState:
    """Read a `*optim_states.pt`. Raises ArtifactError."""
    file = read_torch_file(path)
    raw = _mapping(path, "the file", file.content).get("optimizer_state_dict")
    raw = _mapping(path, "optimizer_state_dict", raw)
    if raw.get("ds_zero_partition_groups"):
        raise ArtifactError(f"{path}: expert parallel training (AutoEP), which is not read")
    # BF16_Optimizer, a ZeRO-1 of its own, does not say its stage.
    stage = _count(raw["zero_stage"]) if "zero_stage" in raw else 1
    counts = raw.get("partition_count")
    parts = {_count(n) for n in counts} if isinstance(counts, list) else {_count(counts)}
    if stage not in (1, 2, 3) or len(parts) != 1 or None in parts:
        raise ArtifactError(
            f"{path}: ZeRO stage {stage}, partition counts {sorted(map(str, parts))}: not a ZeRO "
            "checkpoint, or one of expert parallel training"
        )
    flat = raw.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(flat, list) or not all(isinstance(one, TensorRef) for one in flat):
        raise ArtifactError(f"{path}: holds no fp32 weights: offloaded to NVMe, or stripped")
    return OptimState(
        replace(file, content=None),
        stage,
        next(count for count in parts if count is not None),
        tuple(flat),
        _paddings(raw.get("param_alignment_paddings")),
        _step(file, raw.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")),
    )


def _mapping(path: Path, what: str, value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: {what} is a {type(value).__name__}, not DeepSpeed's states")
    return value


def _list(path: Path, what: str, raw: Mapping[Any, Any]) -> list[Any]:
    found = raw.get(what) or []
    if not isinstance(found, list):
        raise ArtifactError(f"{path}: {what} is a {type(found).__name__}, not DeepSpeed's states")
    return found


def _shapes(path: Path, what: str, value: Any) -> Shapes:
    found = _mapping(path, what, value)
    bad = [n for n, shape in found.items() if not isinstance(n, str) or not is_shape(shape)]
    if bad:
        raise ArtifactError(f"{path}: {what}: {bad[0]} has no shape")
    return {name: tuple(shape) for name, shape in found.items()}


def _tensors(path: Path, what: str, value: Any) -> Mapping[str, TensorRef]:
    found = _mapping(path, what, value)
    bad = [n for n, v in found.items() if not isinstance(n, str) or not isinstance(v, TensorRef)]
    if bad:
        raise ArtifactError(f"{path}: {what}: {bad[0]} is no tensor")
    return found


def _names(path: Path, what: str, value: Any) -> Mapping[str, str]:
    found = _mapping(path, what, value)
    if not all(isinstance(name, str) for pair in found.items() for name in pair):
        raise ArtifactError(f"{path}: {what} is no table of names")
    return found


def _count(value: Any) -> int | None:
    """An integer, or an enumeration's member, which is pickled as its class and its value."""
    if isinstance(value, Foreign) and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int else None


def _paddings(value: Any) -> tuple[Sequence[Any], ...] | None:
    if not isinstance(value, list):
        return None
    # Not copied: a list of references to one long list would become as many long lists.
    return tuple(group if isinstance(group, list | tuple) else () for group in value)


def _step(file: TorchFile, inner: Any) -> bytes | None:
    """The first step count in an optimizer's state, whichever way that optimizer keeps it."""
    state = inner.get("state") if isinstance(inner, dict) else inner
    entries = list(state.values()) if isinstance(state, dict) else state
    for entry in entries if isinstance(entries, list) else ():
        step = entry.get("step") if isinstance(entry, dict) else None
        if isinstance(step, TensorRef) and step.numel == 1:
            extent = file.extent(step)
            with extent.path.open("rb") as handle:
                handle.seek(extent.start)
                return handle.read(extent.nbytes)
        if isinstance(step, int | float):
            return str(step).encode()
    return None
