"""Parse the files of one rank into typed states, and check that those of all ranks fit together.

Errors name the file and the unexpected field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, Coded
from tasks.weights.deepspeed.layout import Layout
from tasks.weights.pickled.tensors import TensorRef, TorchFile, is_shape, read_torch_file
from tasks.weights.pickled.unpickler import Foreign

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelState:
    """Contents of a `*model_states.pt`; numbers are None if they are not stored."""

    file: TorchFile
    module: Mapping[str, TensorRef]  # the state dict; under ZeRO-3 its parameters are placeholders
    buffers: frozenset[str]
    groups: tuple[Shapes, ...] | None  # trained, in the order of the flat groups; None without ZeRO
    frozen: Shapes  # empty if frozen parameters were not saved
    fragments: Mapping[str, TensorRef]  # frozen: this rank's partition under ZeRO-3, else full
    shared: Mapping[str, str]  # name -> name of the parameter that holds the same tensor
    step: int | None
    world_size: int | None
    version: str | None  # of DeepSpeed


@dataclass(frozen=True)
class OptimState:
    """Contents of a `*optim_states.pt`: this rank's part of the fp32 weights."""

    file: TorchFile
    stage: int
    partitions: int  # of each group
    flat: tuple[TensorRef, ...]  # one 1-D tensor per group
    paddings: tuple[Sequence[Any], ...] | None  # after each parameter of each group, in elements
    step: bytes | None  # of the inner optimizer, to compare


def read_model_state(path: Path) -> ModelState:
    """Read a `*model_states.pt`. Raises ArtifactError, also for tensor or pipeline parallelism."""
    file = read_torch_file(path)
    raw = _dict(path, "the file", file.content)
    if raw.get("ds_autoep_layers") or raw.get("autoep_layers"):
        raise _parallel(path, "expert parallel training (AutoEP) is not supported")
    if _count(raw.get("mp_world_size")) not in (None, 1):
        raise _parallel(path, "tensor parallel training is not supported")
    if not isinstance(raw.get("module"), dict):
        raise _parallel(path, "has no module: pipeline parallel training, or not DeepSpeed's")
    groups, buffers = raw.get("param_shapes"), raw.get("buffer_names") or []
    if not isinstance(groups, list | None) or not isinstance(buffers, list):
        raise ArtifactError(f"{path}: param_shapes or buffer_names is no list")
    # References to one long group: a few bytes in the file could expand to any amount of memory.
    if len(set(map(id, groups or ()))) < len(groups or ()):
        raise ArtifactError(f"{path}: param_shapes holds one group twice")
    version = raw.get("ds_version")
    return ModelState(
        file=replace(file, content=None),  # frees the rest of the content
        module={
            name: value
            for name, value in raw["module"].items()
            if isinstance(name, str) and isinstance(value, TensorRef)
        },
        buffers=frozenset(name for name in buffers if isinstance(name, str)),
        groups=None
        if groups is None
        else tuple(_shapes(path, "param_shapes", group) for group in groups),
        frozen=_shapes(path, "frozen_param_shapes", raw.get("frozen_param_shapes") or {}),
        fragments=_dict(
            path, "frozen_param_fragments", raw.get("frozen_param_fragments") or {}, _is_tensor
        ),
        shared=_dict(
            path, "shared_params", raw.get("shared_params") or {}, lambda v: isinstance(v, str)
        ),
        step=_count(raw.get("global_steps")),
        world_size=_count(raw.get("dp_world_size")),
        version=version if isinstance(version, str) else None,
    )


def read_optim_state(path: Path) -> OptimState:
    """Read a `*optim_states.pt`. Raises ArtifactError if damaged or of unsupported training."""
    file = read_torch_file(path)
    raw = _dict(path, "the file", file.content).get("optimizer_state_dict")
    raw = _dict(path, "optimizer_state_dict", raw)
    if raw.get("ds_zero_partition_groups"):
        raise _parallel(path, "expert parallel training (AutoEP) is not supported")
    # BF16_Optimizer partitions like ZeRO-1 and does not store a stage.
    stage = _count(raw["zero_stage"]) if "zero_stage" in raw else 1
    counts = raw.get("partition_count")
    parts = {_count(n) for n in counts} if isinstance(counts, list) else {_count(counts)}
    if stage not in (1, 2, 3) or len(parts) != 1 or None in parts:
        raise _parallel(
            path,
            f"ZeRO stage {stage}, partition counts {sorted(map(str, parts))}: not a ZeRO "
            "checkpoint, or one of expert parallel training",
        )
    flat = raw.get("fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups")
    if not isinstance(flat, list) or not all(map(_is_tensor, flat)):
        raise ArtifactError(f"{path}: holds no fp32 weights: offloaded to NVMe, or stripped")
    paddings = raw.get("param_alignment_paddings")
    return OptimState(
        file=replace(file, content=None),
        stage=stage,
        partitions=next(count for count in parts if count is not None),
        flat=tuple(flat),
        # Not copied: a list of references to one long list would become as many long lists.
        paddings=tuple(group if isinstance(group, list | tuple) else () for group in paddings)
        if isinstance(paddings, list)
        else None,
        step=_step(file, raw.get("optimizer_state_dict" if stage == 3 else "base_optimizer_state")),
    )


def _parallel(path: Path, text: str) -> ArtifactError:
    return ArtifactError(f"{path}: {text}", code="ZERO_PARALLEL")


def _dict(
    path: Path, field: str, value: Any, is_entry: Callable[[Any], bool] | None = None
) -> dict[Any, Any]:
    """Return a dictionary; with `is_entry` its keys must be names, and its values such entries."""
    if not isinstance(value, dict):
        raise ArtifactError(f"{path}: {field} is a {type(value).__name__}, not DeepSpeed's states")
    for name, entry in value.items():
        if is_entry is not None and not (isinstance(name, str) and is_entry(entry)):
            raise ArtifactError(f"{path}: {field}: an unexpected entry {name!a:.200}")
    return value


def _shapes(path: Path, field: str, value: Any) -> Shapes:
    shapes = _dict(path, field, value, is_shape)
    return {name: tuple(shape) for name, shape in shapes.items()}


def _is_tensor(value: Any) -> bool:
    return isinstance(value, TensorRef)


def _count(value: Any) -> int | None:
    """Return an integer; an enumeration member is pickled as its class and its value."""
    if isinstance(value, Foreign) and len(value.args) == 1:
        value = value.args[0]
    return value if type(value) is int else None


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


def rank_findings(
    layout: Layout, models: Sequence[ModelState], ranks: Sequence[OptimState]
) -> Iterator[str]:
    """Yield one line for everything that is wrong with the set of files.

    `ranks` is empty for a universal checkpoint.
    """
    first = models[0]
    if first.groups is None:
        if layout.optim:
            yield "parts of a ZeRO optimizer beside a model without ZeRO"
        return
    if not layout.optim and layout.zero is None:
        world = f"all {first.world_size} ranks"
        text = f"no *_optim_states.pt: the fp32 weights of {world} are absent"
        yield Coded(text, "ZERO_RANK_MISSING")
        return
    counts = {rank.partitions for rank in ranks}
    stages = {rank.stage for rank in ranks}
    if len(counts) > 1 or len(stages) > 1:
        text = f"ranks' files of ZeRO stages {sorted(stages)}, world sizes {sorted(counts)}"
        yield Coded(text, "ZERO_WORLD_DISAGREES")
        return
    if stages and (stages == {3}) != layout.partitioned:
        text = f"model states do not belong to optimizer states of ZeRO-{ranks[0].stage}"
        yield Coded(text, "ZERO_WORLD_DISAGREES")
    yield from _absent(layout, counts.pop() if counts else first.world_size or len(models))
    yield from _mixed(models, ranks)


def _absent(layout: Layout, world: int) -> Iterator[str]:
    for kind, files, due in (
        ("optim", layout.optim, layout.zero is None),
        ("model", layout.model, layout.partitioned),
    ):
        missing = [str(rank) for rank in range(world) if rank not in files]
        if due and missing:
            text = f"{kind} states of {world} ranks, absent: {', '.join(missing)}"
            yield Coded(text, "ZERO_RANK_MISSING")
        for rank in sorted(files):
            if due and rank >= world:
                text = f"{files[rank].name}: there are only {world} ranks"
                yield Coded(text, "ZERO_WORLD_DISAGREES")


def _mixed(models: Sequence[ModelState], ranks: Sequence[OptimState]) -> Iterator[str]:
    recorded: dict[str, set[object]] = {
        "step": {model.step for model in models},
        # A rank that holds only padding has no optimizer state and therefore no step.
        "optimizer step": {rank.step for rank in ranks},
        "DeepSpeed version": {model.version for model in models},
    }
    for what, values in recorded.items():
        if len(values - {None}) > 1:
            text = f"ranks' files of more than one {what}: an overwritten checkpoint"
            yield Coded(text, "ZERO_STEPS_MIXED")
    first = models[0]
    if any(model.groups != first.groups or model.frozen != first.frozen for model in models):
        yield Coded("ranks disagree on the parameters' shapes", "ZERO_STEPS_MIXED")
