"""Locate every parameter: in the ranks' flat fp32 groups, or in a universal checkpoint.

ZeRO-1 and 2 flatten a parameter group, pad it and cut it into equal partitions, one per rank: a
parameter lies in one or two neighbouring partitions, sometimes more. ZeRO-3 partitions each
parameter: every rank holds `ceil(numel / ranks)` elements of it, the last ones padded, at the same
offset of its own flat groups. Reference: DeepSpeed's `runtime/zero/stage_1_and_2.py`,
`runtime/zero/stage3.py`, `utils/zero_to_fp32.py`. ZeRO: https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from math import prod
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.weights.deepspeed.states import ModelState, OptimState, Shapes
from tasks.weights.files.dtypes import is_float
from tasks.weights.files.reader import weight_files
from tasks.weights.files.source import Extent, FullTensor
from tasks.weights.pickled.tensors import TensorRef, TorchFile, read_torch_file

_FILE = "fp32.pt"


class Flat:
    """Concatenation of flat tensors: one group over all ranks, or all groups of one rank."""

    def __init__(self, parts: Sequence[tuple[TorchFile, TensorRef]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(ref.numel for _, ref in parts))

    @property
    def numel(self) -> int:
        """Total number of elements."""
        return self._ends[-1] if self._ends else 0

    def extents(self, start: int, numel: int) -> list[Extent]:
        """Return the byte ranges of elements `[start, start + numel)`, which must exist."""
        ranges, end = [], start + numel
        index = bisect_right(self._ends, start)
        while start < end:
            file, ref = self._parts[index]
            begin = self._ends[index] - ref.numel
            count = min(end, self._ends[index]) - start
            if count:
                ranges.append(file.extent(ref, start - begin, count))
            start, index = start + count, index + 1
        return ranges


def trainable(
    groups: Sequence[Shapes], ranks: Sequence[OptimState], findings: list[str]
) -> dict[str, FullTensor]:
    """Return the trained parameters, in fp32, in the order of training's groups.

    `groups` has shapes by name in the order in which they were flattened, `findings` gets one line
    for everything that does not add up.
    """
    dtypes = {ref.dtype for rank in ranks for ref in rank.flat}
    if len(dtypes) != 1:
        findings.append(f"flat groups of several dtypes: {', '.join(sorted(dtypes))}")
        return {}
    (dtype,) = dtypes
    if not is_float(dtype):
        findings.append(f"flat groups of {dtype}, which is not a float dtype")
        return {}
    places = _by_parameter if ranks[0].stage == 3 else _by_group
    return {
        name: FullTensor(shape, dtype, extents)
        for name, shape, extents in places(groups, ranks, findings)
    }


Place = tuple[str, tuple[int, ...], tuple[Extent, ...]]


def _by_group(
    groups: Sequence[Shapes], ranks: Sequence[OptimState], findings: list[str]
) -> list[Place]:
    counts = {len(rank.flat) for rank in ranks}
    if counts != {len(groups)}:
        findings.append(f"{len(groups)} parameter groups, but flat groups: {sorted(counts)}")
        return []
    located: list[Place] = []
    for index, shapes in enumerate(groups):
        flat = Flat([(rank.file, rank.flat[index]) for rank in ranks])
        starts, end = _starts(shapes, index, ranks[0], findings)
        # The group is padded to a multiple of twice the number of ranks.
        unit = 2 * len(ranks)
        if end > flat.numel or -(-end // unit) != -(-flat.numel // unit):
            findings.append(
                f"group {index}: parameters need {end} elements, the ranks hold {flat.numel}"
            )
            continue
        located += [
            (name, shape, tuple(flat.extents(start, prod(shape))))
            for (name, shape), start in zip(shapes.items(), starts, strict=True)
        ]
    return located


def _starts(
    shapes: Shapes, index: int, rank: OptimState, findings: list[str]
) -> tuple[list[int], int]:
    """Return the start of each parameter in its flattened group, and the end of the last one."""
    paddings = [0] * len(shapes)
    if rank.paddings is not None:
        pads = rank.paddings[index] if index < len(rank.paddings) else ()
        if len(pads) == len(shapes) and all(type(n) is int and n >= 0 for n in pads):
            paddings = list(pads)
        else:
            findings.append(f"group {index}: {len(pads)} paddings for {len(shapes)} parameters")
    sizes = [prod(shape) for shape in shapes.values()]
    ends = list(accumulate(size + pad for size, pad in zip(sizes, paddings, strict=True)))
    return [0, *ends][: len(sizes)], ends[-1] if ends else 0


def _by_parameter(
    groups: Sequence[Shapes], ranks: Sequence[OptimState], findings: list[str]
) -> list[Place]:
    shapes = {name: shape for group in groups for name, shape in group.items()}
    flats = [Flat([(rank.file, ref) for ref in rank.flat]) for rank in ranks]
    share = {name: -(-prod(shape) // len(ranks)) for name, shape in shapes.items()}
    need = sum(share.values())
    for number, flat in enumerate(flats):
        if flat.numel != need:
            findings.append(f"rank {number}: parameters need {need} elements, it has {flat.numel}")
    if any(flat.numel < need for flat in flats):
        return []
    located: list[Place] = []
    at = 0
    for name, shape in shapes.items():
        extents: list[Extent] = []
        for number, flat in enumerate(flats):
            extents += flat.extents(at, _own(prod(shape), share[name], number))
        located.append((name, shape, tuple(extents)))
        at += share[name]
    return located


def frozen_fragments(models: Sequence[ModelState], findings: list[str]) -> dict[str, FullTensor]:
    """Return the frozen parameters of ZeRO-3, of which each rank holds a partition."""
    tensors = {}
    for name, shape in models[0].frozen.items():
        numel, share = prod(shape), -(-prod(shape) // len(models))
        refs = [model.fragments.get(name) for model in models]
        sizes = [ref.numel for ref in refs if ref is not None]
        dtypes = {ref.dtype for ref in refs if ref is not None}
        if sizes != [share] * len(models) or len(dtypes) != 1:
            findings.append(f"{name}: frozen, {numel} elements; the ranks hold {sizes}")
            continue
        extents = [
            model.file.extent(ref, 0, own)
            for number, (model, ref) in enumerate(zip(models, refs, strict=True))
            if ref is not None and (own := _own(numel, share, number))
        ]
        tensors[name] = FullTensor(shape, dtypes.pop(), tuple(extents))
    return tensors


def stored(state: ModelState, names: Sequence[str], findings: list[str]) -> dict[str, FullTensor]:
    """Return full tensors of one model state: buffers, and below ZeRO-3 frozen parameters."""
    tensors = {}
    for name in names:
        ref = state.fragments.get(name) or state.module[name]
        try:
            extents = (state.file.extent(ref),) if ref.numel else ()
        except ArtifactError as error:
            findings.append(f"{name}: {error.message}")
            continue
        tensors[name] = FullTensor(ref.shape, ref.dtype, extents)
    return tensors


def _own(numel: int, share: int, rank: int) -> int:
    """Return the number of a parameter's elements in a rank's partition, without padding."""
    return max(0, min(share, numel - rank * share))


def universal(
    zero: Path, groups: Sequence[Shapes], known: frozenset[str], findings: list[str]
) -> dict[str, FullTensor]:
    """Find the trained parameters of a universal checkpoint: `zero/<parameter>/fp32.pt`.

    `ds_to_universal.py` writes `{"param": tensor}` for ZeRO-1 and 2. For ZeRO-3 it writes the bare
    flat tensor, whose shape is in the model states that were copied beside it.

    `known` are other names that may have a folder: tensors of the module that were not trained.
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
