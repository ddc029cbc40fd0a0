"""A DeepSpeed checkpoint as a `Source`: every tensor by its live name, as ranges of the files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TypeVar

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.deepspeed.agreement import disagreements
from tasks.weights.deepspeed.layout import Layout, find_layout
from tasks.weights.deepspeed.partitioned import frozen_fragments, stored, trainable
from tasks.weights.deepspeed.pieces import Whole
from tasks.weights.deepspeed.ranks import rank_findings
from tasks.weights.deepspeed.states import (
    ModelState,
    OptimState,
    Shapes,
    read_model_state,
    read_optim_state,
)
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.files.source import Extent
from tasks.weights.pickled.tensors import TensorRef, read_torch_file

_SHOWN = 50
_FILE = "fp32.pt"
State = TypeVar("State", ModelState, OptimState)


@dataclass(frozen=True)
class ZeroCheckpoint:
    """An opened checkpoint. See `tasks.weights.files.source.Source`.

    Attributes:
        root: the step's folder.
        stage: 0 (no ZeRO) to 3; 2 for a universal checkpoint of 1 or 2.
        world_size: number of ranks that the weights are spread over.
        step: optimizer steps done; None where it is not told.
        tensors: everything that is held, by live name: trained parameters in fp32, frozen ones and
            buffers as training had them.
        trained: names of the trained parameters.
        buffers: names of the persistent buffers.
        tied: name -> name in `tensors` that holds the same tensor.
    """

    root: Path
    stage: int
    world_size: int
    step: int | None
    tensors: Mapping[str, Whole]
    trained: tuple[str, ...]
    buffers: frozenset[str]
    tied: Mapping[str, str]

    def extents(self, name: str) -> Sequence[Extent]:
        """The ranges that make a tensor, in order."""
        return self.tensors[name].extents

    def sha256(self, name: str) -> str | None:
        """Unknown: DeepSpeed keeps no hashes."""
        return None


def read_zero(folder: Path) -> ZeroCheckpoint:
    """Open a checkpoint of ZeRO-0 to 3, or a universal one; only the files' tables are read.

    Args:
        folder: what was given to `save_checkpoint`, or the folder of one step in it.

    Raises:
        ArtifactError: with every finding: missing ranks, files of several steps, parts that do not
            add up, parameters without data or without elements, other kinds of parallelism.
    """
    layout = find_layout(folder)
    findings: list[str] = []
    models = _read_models(layout.model, findings)
    ranks = [] if layout.zero else _read_all(layout.optim, read_optim_state, findings)
    if models and (ranks or not layout.optim or layout.zero):
        findings += rank_findings(layout, models, ranks)
    if not findings:
        found = _assemble(layout, models, ranks, findings)
        if not findings:
            return found
    raise ArtifactError(
        f"{layout.root}: not a whole checkpoint: {first_and_more(findings)}",
        details=findings[:_SHOWN],
        hint="take the checkpoint that this one was converted from"
        if layout.zero
        else "copy the files of every rank of one step into the folder, or take another step",
    )


def _read_models(files: Mapping[int, Path], findings: list[str]) -> list[ModelState]:
    found: list[ModelState] = []
    for rank, path in sorted(files.items()):
        for state in _read_all({rank: path}, read_model_state, findings):
            found.append(_further(state, found[0]) if found else state)
    return found


def _read_all(
    files: Mapping[int, Path], read: Callable[[Path], State], findings: list[str]
) -> list[State]:
    found = []
    for rank in sorted(files):
        try:
            found.append(read(files[rank]))
        except ArtifactError as error:
            findings.append(error.message)
    return found


def _further(state: ModelState, first: ModelState) -> ModelState:
    """Another rank's state without what every rank says again: of 500 that would be gigabytes."""
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
    found = _trained(layout, first, ranks, findings)
    found |= _untrained(layout, models, set(names) | set(tied), findings)
    findings += [
        f"{name}: has no elements, shape {list(whole.shape)}"
        for name, whole in found.items()
        if not prod(whole.shape) and name not in first.buffers
    ]
    if not found and not findings:
        findings.append("no tensor at all")
    return ZeroCheckpoint(
        root=layout.root,
        stage=3 if layout.partitioned else ranks[0].stage if ranks else 2 if names else 0,
        world_size=ranks[0].partitions if ranks else first.world_size or 1,
        step=first.step,
        tensors={name: found[name] for name in first.module if name in found} | found,
        trained=tuple(names),
        buffers=frozenset(first.buffers & set(found)),
        tied={alias: name for alias, name in tied.items() if name in found},
    )


def _trained(
    layout: Layout, first: ModelState, ranks: Sequence[OptimState], findings: list[str]
) -> dict[str, Whole]:
    groups = first.groups or ()
    if layout.zero is not None:
        beside = frozenset(first.module) | frozenset(first.frozen) | frozenset(first.shared)
        found = universal(layout.zero, groups, beside, findings)
    else:
        found = trainable(groups, ranks, findings) if ranks else {}
    if not layout.partitioned:
        findings += disagreements(first, found)
    return found


def _untrained(
    layout: Layout, models: Sequence[ModelState], known: set[str], findings: list[str]
) -> dict[str, Whole]:
    """Frozen parameters and buffers: what the model has beside the names in `known`."""
    first = models[0]
    rest = [name for name in {**first.module, **first.fragments} if name not in known]
    if not layout.partitioned:
        # ZeRO-1 lists no frozen parameters, but its module holds them as any other stage's does.
        return stored(first, rest, findings)
    findings += [
        f"{name}: a parameter of the model, but no rank holds data of it"
        for name in rest
        if name not in first.buffers and name not in first.frozen
    ]
    buffers = [name for name in rest if name in first.buffers]
    return frozen_fragments(models, findings) | stored(first, buffers, findings)


def _aliases(state: ModelState, trained: set[str]) -> dict[str, str]:
    """Names of tensors that are held under another name: said by DeepSpeed, or, where it does not
    run ZeRO, seen from the storage."""
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
) -> dict[str, Whole]:
    """The trained parameters of a universal checkpoint, in the order of training's groups.

    Args:
        zero: the folder of the parameters.
        groups: shapes by name.
        known: other names that may have a folder: what the module holds beside them.
        findings: what is absent, extra or of another size is appended here.
    """
    shapes = {name: shape for group in groups for name, shape in group.items()}
    there = {path.parent.name for path in zero.glob(f"*/{_FILE}")}
    findings += [f"zero/{name}: not a parameter of the model" for name in sorted(
        there - set(shapes) - known
    )]  # fmt: skip
    found = {}
    for name, shape in shapes.items():
        if name not in there or Path(name).name != name:
            findings.append(f"{name}: no zero/{name}/{_FILE}")
            continue
        try:
            found[name] = _parameter(zero / name / _FILE, shape)
        except ArtifactError as error:
            findings.append(error.message)
    return found


def _parameter(path: Path, shape: tuple[int, ...]) -> Whole:
    file = read_torch_file(path)
    ref = file.content.get("param") if isinstance(file.content, dict) else file.content
    if not isinstance(ref, TensorRef):
        raise ArtifactError(f"{path}: holds no tensor")
    if ref.shape != shape and ref.shape != (prod(shape),):
        raise ArtifactError(f"{path}: {list(ref.shape)}, the model's is {list(shape)}")
    if not is_float(ref.dtype):
        raise ArtifactError(f"{path}: {ref.dtype}, which is no float")
    return Whole(shape, ref.dtype, (file.extent(ref),))
