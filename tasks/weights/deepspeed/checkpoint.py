"""Open a DeepSpeed checkpoint as a `Source`: tensors by live name, as byte ranges of its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, Coded, first_and_more
from tasks.weights.deepspeed.layout import Layout, find_layout
from tasks.weights.deepspeed.partitioned import frozen_fragments, stored, trainable, universal
from tasks.weights.deepspeed.states import (
    ModelState,
    OptimState,
    rank_findings,
    read_model_state,
    read_optim_state,
)
from tasks.weights.files.dtypes import ITEM_BITS, casts, widened
from tasks.weights.files.source import FullTensor, FullTensors, Reader
from tasks.weights.pickled.tensors import TensorRef, TorchFile

SAMPLE = 32
"""Number of elements compared at each end of a tensor."""
_STEP = 2.0**-7
"""Relative tolerance. bf16 rounds by at most 2**-9 and fp16 by less; a wrong tensor differs by its
own size."""
_TINY = 1e-6
_SHOWN = 50
State = TypeVar("State", ModelState, OptimState)


@dataclass(frozen=True)
class ZeroCheckpoint(FullTensors):
    """An opened checkpoint: all tensors by live name.

    Trained parameters are in fp32, frozen ones and buffers in the dtype that training used.
    """

    root: Path  # folder of the step
    stage: int  # 0 (no ZeRO) to 3; 2 for a universal checkpoint of stage 1 or 2
    world_size: int
    step: int | None
    trained: tuple[str, ...]
    buffers: frozenset[str]
    tied: Mapping[str, str]  # name -> name in `tensors` that holds the same tensor


def read_zero(folder: Path) -> ZeroCheckpoint:
    """Open a checkpoint of ZeRO-0 to 3 or a universal one; only the files' tables are read.

    `folder` is that which `save_checkpoint` wrote to, or that of one step in it.

    Raises:
        ArtifactError: ranks are missing, files are of several steps, sizes do not add up,
            parameters have no data or no elements, or training used another kind of parallelism.
            Lists every finding.
    """
    layout = find_layout(folder)
    findings: list[str] = []
    models = _read_models(layout.model, findings)
    ranks = [] if layout.zero else _read_all(layout.optim, read_optim_state, findings)
    if models and (ranks or not layout.optim or layout.zero):
        findings += rank_findings(layout, models, ranks)
    if not findings:
        checkpoint = _assemble(layout, models, ranks, findings)
        if not findings:
            return checkpoint
    raise ArtifactError(
        f"{layout.root}: not a complete checkpoint: {first_and_more(findings)}",
        details=findings[:_SHOWN],
        hint="use the checkpoint that this one was converted from"
        if layout.zero
        else "copy the files of every rank of one step into the folder, or use another step",
    )


def _read_models(files: Mapping[int, Path], findings: list[str]) -> list[ModelState]:
    states: list[ModelState] = []
    for rank, path in sorted(files.items()):
        for state in _read_all({rank: path}, read_model_state, findings):
            states.append(_further(state, states[0]) if states else state)
    return states


def _read_all(
    files: Mapping[int, Path], read: Callable[[Path], State], findings: list[str]
) -> list[State]:
    states = []
    for rank in sorted(files):
        try:
            states.append(read(files[rank]))
        except ArtifactError as error:
            findings.append(Coded(error.message, error.code))
    return states


def _further(state: ModelState, first: ModelState) -> ModelState:
    """Return another rank's state without what all ranks repeat (gigabytes for 500 ranks)."""
    groups = first.groups if state.groups == first.groups else state.groups
    frozen = first.frozen if state.frozen == first.frozen else state.frozen
    return replace(state, module={}, shared={}, groups=groups, frozen=frozen)


def _assemble(
    layout: Layout,
    models: Sequence[ModelState],
    ranks: Sequence[OptimState],
    findings: list[str],
) -> ZeroCheckpoint:
    first = models[0]
    names = [name for group in first.groups or () for name in group]
    findings += [f"{n}: in two parameter groups" for n, c in Counter(names).items() if c > 1]
    tied = _aliases(first, set(names))
    tensors = _trained(layout, first, ranks, findings)
    tensors |= _untrained(layout, models, set(names) | set(tied), findings)
    findings += [
        Coded(f"{name}: has no elements, shape {list(tensor.shape)}", "ZERO_EMPTY")
        for name, tensor in tensors.items()
        if not prod(tensor.shape) and name not in first.buffers
    ]
    if not tensors and not findings:
        findings.append("no tensor at all")
    return ZeroCheckpoint(
        root=layout.root,
        stage=3 if layout.partitioned else ranks[0].stage if ranks else 2 if names else 0,
        world_size=ranks[0].partitions if ranks else first.world_size or 1,
        step=first.step,
        tensors={name: tensors[name] for name in first.module if name in tensors} | tensors,
        trained=tuple(names),
        buffers=frozenset(first.buffers & set(tensors)),
        tied={alias: name for alias, name in tied.items() if name in tensors},
    )


def _trained(
    layout: Layout, first: ModelState, ranks: Sequence[OptimState], findings: list[str]
) -> dict[str, FullTensor]:
    groups = first.groups or ()
    if layout.zero is not None:
        beside = frozenset(first.module) | frozenset(first.frozen) | frozenset(first.shared)
        tensors = universal(layout.zero, groups, beside, findings)
    else:
        tensors = trainable(groups, ranks, findings) if ranks else {}
    if not layout.partitioned:
        findings += _disagreements(first, tensors)
    return tensors


def _untrained(
    layout: Layout, models: Sequence[ModelState], known: set[str], findings: list[str]
) -> dict[str, FullTensor]:
    """Return frozen parameters and buffers: the tensors whose names are not in `known`."""
    first = models[0]
    rest = [name for name in {**first.module, **first.fragments} if name not in known]
    if not layout.partitioned:
        # ZeRO-1 does not list frozen parameters, but its module contains them.
        return stored(first, rest, findings)
    findings += [
        Coded(f"{name}: a parameter of the model, but no rank holds data of it", "ZERO_EMPTY")
        for name in rest
        if name not in first.buffers and name not in first.frozen
    ]
    buffers = [name for name in rest if name in first.buffers]
    return frozen_fragments(models, findings) | stored(first, buffers, findings)


def _aliases(state: ModelState, trained: set[str]) -> dict[str, str]:
    """Return names of tied tensors -> name of the tensor that is stored.

    DeepSpeed lists them; without ZeRO they are recognised by their shared storage.
    """
    tied = {alias: name for alias, name in state.shared.items() if alias not in trained}
    if state.groups is None:
        holders: dict[object, str] = {}
        for name, ref in state.module.items():
            holder = holders.setdefault(ref, name)
            if holder != name:
                tied[name] = holder
    return tied


def _disagreements(state: ModelState, weights: Mapping[str, FullTensor]) -> list[str]:
    """Return one line for every trained weight whose fp32 values differ from the module's.

    Below ZeRO-3 a checkpoint holds each weight twice: as a full tensor in 16 bits, and partitioned
    in fp32. A few elements of every tensor are compared, since sizes alone cannot reveal a wrong
    order: DeepSpeed 0.19.8's own `ds_to_universal.py` mixes up the parameters of a run with
    `round_robin_gradients`, and its output loads without an error.
    """
    findings = []
    for name, tensor in weights.items():
        ref = state.module.get(name)
        if ref is None:
            findings.append(f"{name}: trained, but not in the module")
        elif casts(ref.dtype, "F32") and casts(tensor.dtype, "F32"):
            finding = _difference(state.file, ref, tensor)
            findings += [f"{name}: {finding}"] if finding else []
    return findings


def _difference(file: TorchFile, ref: TensorRef, tensor: FullTensor) -> str:
    """Return how the module's tensor differs from the trained one; "" if they agree."""
    if ref.shape != tensor.shape or not ref.contiguous:
        return (
            f"shape {list(tensor.shape)}, in the module {list(ref.shape)} "
            f"with strides {list(ref.stride)}"
        )
    if not ref.numel:
        return ""
    # Closed after each tensor: a universal checkpoint has one file per parameter.
    with Reader(tensor.extents) as trained, Reader([file.extent(ref)]) as module:
        for start in {0, max(0, ref.numel - SAMPLE)}:
            count = min(SAMPLE, ref.numel - start)
            fp32 = _values(trained, tensor.dtype, start, count)
            module_values = _values(module, ref.dtype, start, count)
            # NaN and infinity are ignored: other checks report values that are not finite.
            with np.errstate(invalid="ignore"):
                differs = np.abs(fp32 - module_values) > _STEP * np.abs(fp32) + _TINY
            if differs.any():
                return "its fp32 values are not those of the module"
    return ""


def _values(reader: Reader, dtype: str, start: int, count: int) -> NDArray[Any]:
    """Read elements `[start, start + count)` as fp32."""
    item = ITEM_BITS[dtype] // 8
    return widened(reader.read(start * item, count * item), dtype)
