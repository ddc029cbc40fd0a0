"""Parse the files of one rank into typed states; errors name the file and the unexpected field."""

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
    """Contents of a `*model_states.pt`.

    Attributes:
        file: the opened file.
        module: tensors of the state dict; under ZeRO-3 its parameters are placeholders.
        buffers: names of the tensors that are buffers.
        groups: shapes of trainable parameters in the order of the flat groups; None without ZeRO.
        frozen: shapes of the frozen parameters; empty if they were not saved.
        fragments: data of the frozen parameters: this rank's partition under ZeRO-3, else full.
        shared: name -> name of the parameter that holds the same tensor.
        step: number of training steps; None if it is not stored.
        world_size: number of data-parallel ranks; None if it is not stored.
        version: version of DeepSpeed; None if it is not stored.
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
    """Contents of a `*optim_states.pt`: this rank's part of the fp32 weights.

    Attributes:
        file: the opened file.
        stage: ZeRO stage: 1, 2 or 3.
        partitions: number of partitions of each group.
        flat: one 1-D tensor per group.
        paddings: elements of padding after each parameter of each group; None if there are none.
        step: step of the inner optimizer, as bytes to compare; None if it is not stored.
    """

    file: TorchFile
    stage: int
    partitions: int
    flat: tuple[TensorRef, ...]
    paddings: tuple[Sequence[Any], ...] | None
    step: bytes | None


def read_model_state(path: Path) -> ModelState:
    """Read a `*model_states.pt`. Raises ArtifactError, also for tensor or pipeline parallelism."""
    file = read_torch_file(path)
    raw = _mapping(path, "the file", file.content)
    if raw.get("ds_autoep_layers") or raw.get("autoep_layers"):
        raise ArtifactError(
            f"{path}: expert parallel training (AutoEP) is not supported", code="ZERO_PARALLEL"
        )
    if _count(raw.get("mp_world_size")) not in (None, 1):
        raise ArtifactError(
            f"{path}: tensor parallel training is not supported", code="ZERO_PARALLEL"
        )
    if not isinstance(raw.get("module"), dict):
        raise ArtifactError(
            f"{path}: has no module: pipeline parallel training, or not DeepSpeed's",
            code="ZERO_PARALLEL",
        )
    groups = None if raw.get("param_shapes") is None else _list(path, "param_shapes", raw)
    # References to one long group: a few bytes in the file could expand to any amount of memory.
    if len(set(map(id, groups or ()))) < len(groups or ()):
        raise ArtifactError(f"{path}: param_shapes holds one group twice")
    version = raw.get("ds_version")
    return ModelState(
        replace(file, content=None),  # frees the rest of the content
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
    """Read a `*optim_states.pt`. Raises ArtifactError if damaged or of unsupported training."""
    file = read_torch_file(path)
    raw = _mapping(path, "the file", file.content).get("optimizer_state_dict")
    raw = _mapping(path, "optimizer_state_dict", raw)
    if raw.get("ds_zero_partition_groups"):
        raise ArtifactError(
            f"{path}: expert parallel training (AutoEP) is not supported", code="ZERO_PARALLEL"
        )
    # BF16_Optimizer partitions like ZeRO-1 and does not store a stage.
    stage = _count(raw["zero_stage"]) if "zero_stage" in raw else 1
    counts = raw.get("partition_count")
    parts = {_count(n) for n in counts} if isinstance(counts, list) else {_count(counts)}
    if stage not in (1, 2, 3) or len(parts) != 1 or None in parts:
        raise ArtifactError(
            f"{path}: ZeRO stage {stage}, partition counts {sorted(map(str, parts))}: not a ZeRO "
            "checkpoint, or one of expert parallel training",
            code="ZERO_PARALLEL",
        )
    flat = raw.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(flat, list) or not all(isinstance(ref, TensorRef) for ref in flat):
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
    value = raw.get(what) or []
    if not isinstance(value, list):
        raise ArtifactError(f"{path}: {what} is a {type(value).__name__}, not DeepSpeed's states")
    return value


def _shapes(path: Path, what: str, value: Any) -> Shapes:
    shapes = _mapping(path, what, value)
    bad = [n for n, shape in shapes.items() if not isinstance(n, str) or not is_shape(shape)]
    if bad:
        raise ArtifactError(f"{path}: {what}: {bad[0]} has no shape")
    return {name: tuple(shape) for name, shape in shapes.items()}


def _tensors(path: Path, what: str, value: Any) -> Mapping[str, TensorRef]:
    tensors = _mapping(path, what, value)
    bad = [n for n, v in tensors.items() if not isinstance(n, str) or not isinstance(v, TensorRef)]
    if bad:
        raise ArtifactError(f"{path}: {what}: {bad[0]} is not a tensor")
    return tensors


def _names(path: Path, what: str, value: Any) -> Mapping[str, str]:
    names = _mapping(path, what, value)
    if not all(isinstance(name, str) for pair in names.items() for name in pair):
        raise ArtifactError(f"{path}: {what} does not map names to names")
    return names


def _count(value: Any) -> int | None:
    """Return an integer; an enumeration member is pickled as its class and its value."""
    if isinstance(value, Foreign) and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int else None


def _paddings(value: Any) -> tuple[Sequence[Any], ...] | None:
    if not isinstance(value, list):
        return None
    # Not copied: a list of references to one long list would become as many long lists.
    return tuple(group if isinstance(group, list | tuple) else () for group in value)


def _step(file: TorchFile, inner: Any) -> bytes | None:
    """Return the first step count in an optimizer's state, in whichever form it is stored."""
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
