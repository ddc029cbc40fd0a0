"""Recompute sampled rows of a merge of ours, in fp64.

    results = recompute(plan, sources, merged)
    require([recomputed_check(results)], stage="merge")

A merge of ours adds in fp32 and rounds once, in a way that is known: an element is wrong if it is
not the rounding of a number within fp32's error of the exact sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from tasks.core.contract import Check
from tasks.weights.expected import (
    Array,
    Block,
    Values,
    base_of,
    blocks,
    comparable,
    random_parts,
    round_with,
    small,
)
from tasks.weights.files.dtypes import (
    DTYPE_NAMES,
    NUMPY,
    rounded,
    torch_dtype,
)
from tasks.weights.files.tensors import Sources, Tensors
from tasks.weights.plan import (
    Op,
    Plan,
    matrix_shape,
)
from tasks.weights.rounding import GRIDS

_HINT = "merge again: force=[merge]; if it fails again, suspect the disk or the memory"
_UNIT = 2.0**-24
"""Largest relative error of one rounding in fp32."""


@dataclass(frozen=True)
class Recomputed:
    """Result of the recomputation of one tensor."""

    name: str
    elements: int = 0
    wrong: int = 0  # elements that differ from base plus adapter by more than rounding
    skipped: str = ""  # reason why it was not recomputed


def recompute(plan: Plan, sources: Sources, merged: Tensors) -> list[Recomputed]:
    """Recompute sampled rows of every tensor of a merge of ours, in fp64."""
    return [_recomputed(op, sources, merged) for op in plan.ops]


def recomputed_check(results: Sequence[Recomputed]) -> Check:
    """Return one check for all tensors; it names the first that are wrong."""
    wrong = [f"{r.name} ({r.wrong} of {r.elements})" for r in results if r.wrong]
    skipped = [result for result in results if result.skipped]
    text = f"{sum(r.elements for r in results)} elements of {len(results)} tensors are"
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        text = f"{len(wrong)} of {len(results)} tensors are not: {', '.join(wrong[:3])}{more}"
    if skipped:
        text += f"; {len(skipped)} not recomputed: {skipped[0].name}, {skipped[0].skipped}"
    expected = "base + scale * B A, rounded once"
    return Check("sampled rows", expected, text, ok=not wrong, hint=_HINT)


def _recomputed(op: Op, sources: Sources, merged: Tensors) -> Recomputed:
    reason = comparable(op, sources)
    if not reason and op.dtype not in NUMPY:
        reason = f"written as {op.dtype}"
    if reason:
        return Recomputed(op.name, skipped=reason)
    elements, wrong = 0, 0
    with Values(merged, op.name, op.dtype, op.shape) as written:
        read = _rows_as_trained(op, sources)
        for block in blocks(op, sources, np.float64, sampled=True, read=read):
            values = written.rows(block.first, block.first + len(block.base))
            low, high = _rounded_range(op, block)
            wrong += int(np.count_nonzero(~((low <= values) & (values <= high))))
            elements += values.size
    return Recomputed(op.name, elements, wrong)


def _rounded_range(op: Op, block: Block) -> tuple[Array, Array]:
    """Return the smallest and the largest right value of each element of a merge of ours."""
    exact, slack = block.base + block.change, _fp32_error(block, changed=bool(op.terms))
    edges = exact - slack, exact + slack
    low, high = (_nearest(edge, op.dtype) for edge in edges)
    if op.unbiased and op.dtype in GRIDS:
        parts = random_parts(op.name, block.first, *exact.shape)
        down, up = (round_with(edge, parts, op.dtype) for edge in edges)
        # A replaced tensor has no base to compare with: every element is rounded without bias.
        size = np.abs(block.change)
        sure = small(size + slack, block.base, op.dtype) | (not op.terms)
        maybe = small(size - slack, block.base, op.dtype) | (not op.terms)
        low, high = (
            np.where(sure, own, np.where(maybe, pick(own, near), near))
            for own, near, pick in ((down, low, np.minimum), (up, high, np.maximum))
        )
    return low, high


def _fp32_error(block: Block, *, changed: bool) -> Array:
    """Return a bound of the rounding error of an fp32 merge, before its last rounding."""
    values = block.base + block.change
    error = 2 * _UNIT * np.abs(block.base)
    if block.stretch is not None:
        # Norms in fp32 sum squares in any order.
        sums = 8 + sqrt(values.size / block.stretch.size)
        error = error * np.abs(block.stretch) + sums * _UNIT * np.abs(values)
    error = error + block.roundings * _UNIT * block.size
    return error + 2 * _UNIT * np.abs(values) if changed else error


def _nearest(values: Array, dtype: str) -> Array:
    """Round to fp32 and then to a dtype, as a merge does; monotone."""
    with np.errstate(over="ignore"):
        wide = values.astype(np.float32)
    return rounded(wide, dtype)


def _rows_as_trained(op: Op, sources: Sources) -> Callable[[int, int], Array] | None:
    """Return a reader of rows of the base as QLoRA training quantized it; None for the stored."""
    how = op.quantization
    if how is None or how["base"] != "dequantized":
        return None
    import torch

    from tasks.weights.quantized.nf4 import RowsAsTrained, as_trained

    with base_of(op, sources) as stored:
        values = torch.from_numpy(stored.rows(0, matrix_shape(op.shape)[0]))
    loaded = values.to(torch_dtype(DTYPE_NAMES[how["loaded_dtype"]]))
    if how.get("turned"):  # `RowsAsTrained` does not support it
        matrix = as_trained(loaded, how)
        return lambda first, end: matrix[first:end].float().numpy()
    rows = RowsAsTrained(loaded, how)
    return lambda first, end: rows.rows(first, end).float().numpy()
