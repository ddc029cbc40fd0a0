"""Open a DeepSpeed checkpoint as a `Source`: tensors by live name, as byte ranges of its files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeVar

from tasks.core.errors import ArtifactError, Coded, first_and_more
from tasks.weights.deepspeed.agreement import disagreements
from tasks.weights.deepspeed.layout import Layout, find_layout
from tasks.weights.deepspeed.partitioned import frozen_fragments, stored, trainable
from tasks.weights.deepspeed.ranks import rank_findings
from tasks.weights.deepspeed.states import (
    ModelState,
    OptimState,
    Shapes,
    read_model_state,
    read_optim_state,
)
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.files.index import weight_files
from tasks.weights.files.source import Extent, FullTensor
from tasks.weights.pickled.tensors import TensorRef, read_torch_file

_SHOWN = 50
_FILE = "fp32.pt"
State = TypeVar("State", ModelState, OptimState)


@dataclass(frozen=True)
class ZeroCheckpoint:
    """An opened checkpoint; implements `tasks.weights.files.source.Source`.

    Attributes:
        root: folder of the step.
        stage: ZeRO stage, 0 (no ZeRO) to 3; 2 for a universal checkpoint of stage 1 or 2.
        world_size: number of ranks that the weights are partitioned over.
        step: number of optimizer steps; None if the checkpoint does not contain it.
        tensors: all tensors by live name: trained parameters in fp32, frozen ones and buffers in
            the dtype that training used.
        trained: names of the trained parameters.
        buffers: names of the persistent buffers.
        tied: name -> name in `tensors` that holds the same tensor.
    """

    root: Path
    stage: int
    world_size: int
    step: int | None
    tensors: Mapping[str, FullTensor]
    trained: tuple[str, ...]
    buffers: frozenset[str]
    tied: Mapping[str, str]

    def extents(self, name: str) -> Sequence[Extent]:
        """Return the byte ranges of a tensor, in order."""
        return self.tensors[name].extents

    def checksum(self, name: str) -> str | None:
        """Return None: DeepSpeed stores no hashes."""
        return None


def read_zero(folder: Path) -> ZeroCheckpoint:
    """Open a checkpoint of ZeRO-0 to 3 or a universal one; only the files' tables are read.

    Args:
        folder: the folder that `save_checkpoint` wrote to, or the folder of one step in it.

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
        findings += disagreements(first, tensors)
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


def universal(
    zero: Path, groups: Sequence[Shapes], known: frozenset[str], findings: list[str]
) -> dict[str, FullTensor]:
    """Find the trained parameters of a universal checkpoint: `zero/<parameter>/fp32.pt`.

    `ds_to_universal.py` writes `{"param": tensor}` for ZeRO-1 and 2. For ZeRO-3 it writes the bare
    flat tensor, whose shape is in the model states that were copied beside it.

    Args:
        zero: folder of the parameters.
        groups: shapes of the trained parameters by name, in the order of training's groups.
        known: other names that may have a folder: tensors of the module that were not trained.
        findings: gets one line per parameter that is absent, unknown or of another size.
    """
    shapes = {name: shape for group in groups for name, shape in group.items()}
    folders = {path.parent.name for path in weight_files(zero, f"*/{_FILE}")}
    unknown = sorted(folders - set(shapes) - known)
    findings += [f"zero/{name}: not a parameter of the model" for name in unknown]
    tensors = {}
    for name, shape in shapes.items():
        if name not in folders or Path(name).name != name:
            findings.append(f"{name}: no zero/{name}/{_FILE}")
            continue
        try:
            tensors[name] = _parameter(zero / name / _FILE, shape)
        except ArtifactError as error:
            findings.append(error.message)
    return tensors


def _parameter(path: Path, shape: tuple[int, ...]) -> FullTensor:
    file = read_torch_file(path)
    ref = file.content.get("param") if isinstance(file.content, dict) else file.content
    if not isinstance(ref, TensorRef):
        raise ArtifactError(f"{path}: holds no tensor")
    if ref.shape != shape and ref.shape != (prod(shape),):
        raise ArtifactError(f"{path}: shape {list(ref.shape)}, the model's is {list(shape)}")
    if not is_float(ref.dtype):
        raise ArtifactError(f"{path}: {ref.dtype} is not a float dtype")
    return FullTensor(shape, ref.dtype, (file.extent(ref),))
