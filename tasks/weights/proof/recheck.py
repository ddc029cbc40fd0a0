"""Recompute sampled rows of a merge: the written tensors are `base + scale * B A`, rounded once.

Model outputs cannot show a small fault: after five steps an adapter hardly changes a
log-probability, and a module that was left out changes none. So rows of every written tensor are
read back and recomputed from base and adapter in fp64, without the code that merges
(`lora_merge.py`, `kernels.py`). A merge adds in fp32 and rounds once. An element is right if it is
the rounding of a number within fp32's error of the exact one; where the update may be on either
side of two steps, either rounding is right. So a correct merge has no wrong element; a module left
out, a scale off by 2 %, another base or other random bits have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt

import numpy as np

from tasks.core.contract import Check
from tasks.weights.execute.compute import matrix_shape
from tasks.weights.execute.copying import opened
from tasks.weights.execute.outcome import Measured
from tasks.weights.files.dtype_conversion import NUMPY, rounded, widened
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.header import ITEM_BITS
from tasks.weights.files.reader import DTYPE_NAMES, torch_dtype
from tasks.weights.files.source import Source
from tasks.weights.plan.operations import Op, Plan
from tasks.weights.proof.compare import comparable
from tasks.weights.proof.expected import Array, BaseRows, Block, Expected
from tasks.weights.proof.unbiased import random_parts, round_with, small
from tasks.weights.quantized.packed import STORED
from tasks.weights.rounding import GRIDS

_HINT = "merge again: force=[merge]; if it fails again, suspect the disk or the memory"
_UNIT = 2.0**-24
"""Largest relative error of one rounding in fp32."""


@dataclass(frozen=True)
class Recomputed:
    """Result of the recomputation of one tensor.

    Attributes:
        name: its key.
        elements: number of recomputed elements.
        wrong: elements that differ from base plus adapter by more than rounding.
        skipped: reason why it was not recomputed; "" if it was.
    """

    name: str
    elements: int = 0
    wrong: int = 0
    skipped: str = ""


def recompute(plan: Plan, sources: Mapping[str, Source], merged: Source) -> list[Recomputed]:
    """Recompute sampled rows of every tensor of a merge.

    Raises:
        ArtifactError: a file cannot be read.
    """
    return [_recomputed(op, sources, merged) for op in plan.ops]


def recomputed_check(results: list[Recomputed]) -> Check:
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


def _recomputed(op: Op, sources: Mapping[str, Source], merged: Source) -> Recomputed:
    reason = comparable(op, sources)
    if reason or op.dtype not in NUMPY:
        return Recomputed(op.name, skipped=reason or f"written as {op.dtype}")
    expected = Expected(op, sources, np.float64)
    elements, wrong, item = 0, 0, ITEM_BITS[op.dtype] // 8 * expected.columns
    with contextlib.ExitStack() as stack:
        written = stack.enter_context(Reader(merged.extents(op.name)))
        if _is_dequantized(op):
            base_rows = _as_trained(op, sources)
        else:
            base_rows = stack.enter_context(BaseRows(op, sources)).rows
        for first, end in expected.sampled_rows():
            values = widened(written.read(first * item, (end - first) * item), op.dtype)
            block = expected.changed(first, base_rows(first, end))
            low, high = _range(op, block)
            wrong += int(np.count_nonzero(~((low <= values) & (values <= high))))
            elements += values.size
    return Recomputed(op.name, elements, wrong)


def _range(op: Op, block: Block) -> tuple[Array, Array]:
    """Return the smallest and the largest right value of each element, 1-D."""
    exact, slack = block.base + block.change, _fp32_error(block, changed=bool(op.terms))
    edges = exact - slack, exact + slack
    low, high = (_rounded(edge, op.dtype) for edge in edges)
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
    return low.ravel(), high.ravel()


def _fp32_error(block: Block, *, changed: bool) -> Array:
    """Return a bound of the rounding error of an fp32 merge, before its last rounding."""
    values = block.base + block.change
    error = 2 * _UNIT * np.abs(block.base)
    if block.stretch is not None:
        error *= np.abs(block.stretch)
    for part in block.parts:
        error[part.rows] += part.roundings * _UNIT * (np.abs(part.left) @ np.abs(part.right))
    if block.stretch is not None:
        # Norms in fp32 sum squares in any order.
        error += (8 + sqrt(values.size / block.stretch.size)) * _UNIT * np.abs(values)
    return error + 2 * _UNIT * np.abs(values) if changed else error


def _is_dequantized(op: Op) -> bool:
    """Return True if the merge goes into the base as QLoRA training quantized it."""
    how = op.quantization
    return how is not None and STORED not in how and how["base"] == "dequantized"


def _as_trained(op: Op, sources: Mapping[str, Source]) -> Callable[[int, int], Array]:
    """Return a reader of rows of the base as QLoRA training quantized it, in fp32; needs torch."""
    import torch

    from tasks.weights.execute.full_tensors import full_tensor
    from tasks.weights.quantized.nf4 import RowsAsTrained

    how, columns = op.quantization or {}, matrix_shape(op.shape)[1]
    if op.transpose or how.get("turned"):  # `RowsAsTrained` does not support these
        matrix = full_tensor(op, sources, Measured()).reshape(-1, columns)
        return lambda first, end: matrix[first:end].float().numpy()
    with opened(op, sources) as reader:
        stored = torch.from_numpy(reader.read()).view(torch_dtype(op.source_dtype))
    loaded = stored.reshape(-1, columns).to(torch_dtype(DTYPE_NAMES[how["loaded_dtype"]]))
    quantized = RowsAsTrained(loaded, how)
    return lambda first, end: quantized.rows(first, end).float().numpy()


def _rounded(values: Array, dtype: str) -> Array:
    """Round to fp32 and then to a dtype, as a merge does; monotone."""
    with np.errstate(over="ignore"):
        wide = values.astype(np.float32)
    return rounded(wide, dtype)
