"""Every parameter's place in the ranks' flat fp32 groups.

ZeRO-1 and 2 flatten a parameter group, pad it and cut it into equal parts, one a rank: a parameter
lies in one or two neighbouring parts, sometimes more. ZeRO-3 cuts each parameter: every rank holds
`ceil(numel / ranks)` elements of it, the last ones padded, at the same place of its own flat
groups. Reference: DeepSpeed's `runtime/zero/stage_1_and_2.py`, `runtime/zero/stage3.py`,
`utils/zero_to_fp32.py`. ZeRO: https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod

from tasks.core.errors import ArtifactError
from tasks.weights.deepspeed.pieces import Flat, Whole
from tasks.weights.deepspeed.states import ModelState, OptimState, Shapes
from tasks.weights.files.dtype_bits import is_float
from tasks.weights.files.source import Extent


def trainable(
    groups: Sequence[Shapes], ranks: Sequence[OptimState], findings: list[str]
) -> dict[str, Whole]:
    """The trained parameters, in fp32, in the order of training's groups.

    Args:
        groups: shapes by name, in the order in which they were flattened.
        ranks: all of them, in order.
        findings: what does not add up is appended here.
    """
    dtypes = {ref.dtype for rank in ranks for ref in rank.flat}
    if len(dtypes) != 1:
        findings.append(f"flat groups of several dtypes: {', '.join(sorted(dtypes))}")
        return {}
    (dtype,) = dtypes
    if not is_float(dtype):
        findings.append(f"flat groups of {dtype}, which is no float")
        return {}
    places = _by_parameter if ranks[0].stage == 3 else _by_group
    return {
        name: Whole(shape, dtype, extents)
        for name, shape, extents in places(groups, ranks, findings)
    }


Place = tuple[str, tuple[int, ...], tuple[Extent, ...]]


def _by_group(
    groups: Sequence[Shapes], ranks: Sequence[OptimState], findings: list[str]
) -> list[Place]:
    """ZeRO-1 and 2."""
    counts = {len(rank.flat) for rank in ranks}
    if counts != {len(groups)}:
        findings.append(f"{len(groups)} parameter groups, but flat groups: {sorted(counts)}")
        return []
    found: list[Place] = []
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
        found += [
            (name, shape, tuple(flat.extents(start, prod(shape))))
            for (name, shape), start in zip(shapes.items(), starts, strict=True)
        ]
    return found


def _starts(
    shapes: Shapes, index: int, rank: OptimState, findings: list[str]
) -> tuple[list[int], int]:
    """Where each parameter begins in its flattened group, and where the last one ends."""
    paddings = [0] * len(shapes)
    if rank.paddings is not None:
        given = rank.paddings[index] if index < len(rank.paddings) else ()
        if len(given) == len(shapes) and all(type(n) is int and n >= 0 for n in given):
            paddings = list(given)
        else:
            findings.append(f"group {index}: {len(given)} paddings for {len(shapes)} parameters")
    sizes = [prod(shape) for shape in shapes.values()]
    ends = list(accumulate(size + pad for size, pad in zip(sizes, paddings, strict=True)))
    return [0, *ends][: len(sizes)], ends[-1] if ends else 0


def _by_parameter(
    groups: Sequence[Shapes], ranks: Sequence[OptimState], findings: list[str]
) -> list[Place]:
    """ZeRO-3."""
    shapes = {name: shape for group in groups for name, shape in group.items()}
    flats = [Flat([(rank.file, ref) for ref in rank.flat]) for rank in ranks]
    share = {name: -(-prod(shape) // len(ranks)) for name, shape in shapes.items()}
    need = sum(share.values())
    for number, flat in enumerate(flats):
        if flat.numel != need:
            findings.append(f"rank {number}: parameters need {need} elements, it has {flat.numel}")
    if any(flat.numel < need for flat in flats):
        return []
    found: list[Place] = []
    at = 0
    for name, shape in shapes.items():
        extents: list[Extent] = []
        for number, flat in enumerate(flats):
            extents += flat.extents(at, _own(prod(shape), share[name], number))
        found.append((name, shape, tuple(extents)))
        at += share[name]
    return found


def frozen_fragments(models: Sequence[ModelState], findings: list[str]) -> dict[str, Whole]:
    """Frozen parameters under ZeRO-3: each rank holds its part of each, in the training dtype."""
    found = {}
    for name, shape in models[0].frozen.items():
        numel, share = prod(shape), -(-prod(shape) // len(models))
        refs = [model.fragments.get(name) for model in models]
        held = [ref.numel for ref in refs if ref is not None]
        dtypes = {ref.dtype for ref in refs if ref is not None}
        if held != [share] * len(models) or len(dtypes) != 1:
            findings.append(f"{name}: frozen, {numel} elements; the ranks hold {held}")
            continue
        extents = [
            model.file.extent(ref, 0, own)
            for number, (model, ref) in enumerate(zip(models, refs, strict=True))
            if ref is not None and (own := _own(numel, share, number))
        ]
        found[name] = Whole(shape, dtypes.pop(), tuple(extents))
    return found


def stored(state: ModelState, names: Sequence[str], findings: list[str]) -> dict[str, Whole]:
    """Tensors that lie whole in one model state: buffers, and below ZeRO-3 what is frozen."""
    found = {}
    for name in names:
        ref = state.fragments.get(name) or state.module[name]
        try:
            extents = (state.file.extent(ref),) if ref.numel else ()
        except ArtifactError as error:
            findings.append(f"{name}: {error.message}")
            continue
        found[name] = Whole(ref.shape, ref.dtype, extents)
    return found


def _own(numel: int, share: int, rank: int) -> int:
    """Elements of a parameter that are a rank's, its padding not counted."""
    return max(0, min(share, numel - rank * share))
