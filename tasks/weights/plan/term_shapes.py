"""Check that the operands of a term fit the tensor that it changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tasks.weights.execute.compute import matrix_shape
from tasks.weights.plan.adapter_ops import Add, Dora, LowRank, Rows, Stride, Term, as_slice

Shape = tuple[int, ...]


def term_findings(term: Term, shape: Shape, operands: Mapping[str, Shape]) -> Iterator[str]:
    """Yield the misfits of a term and its output tensor, one line each.

    Args:
        term: the change.
        shape: shape of the output tensor.
        operands: shapes of the adapter tensors that the term names, by name.
    """
    match term:
        case LowRank():
            yield from _scale(term.scale)
            yield from _low_rank(term, shape, operands[term.a], operands[term.b])
        case Dora():
            yield from _scale(term.scale)
            plain = LowRank(term.a, term.b, term.scale, term.transpose, out_start=term.out_start)
            yield from _low_rank(plain, shape, operands[term.a], operands[term.b])
            wanted = operands[term.b][:1]
            if operands[term.magnitude] != wanted:
                actual = list(operands[term.magnitude])
                yield f"{term.magnitude}: is {actual}, magnitudes must be {list(wanted)}"
        case Rows():
            yield from _rows(term, shape, operands[term.values])
        case Add():
            yield from _scale(term.scale)
            if operands[term.value] != shape:
                yield f"{term.value}: is {list(operands[term.value])}, must be {list(shape)}"


def _scale(scale: float) -> Iterator[str]:
    if not math.isfinite(scale) or scale == 0:
        yield f"scale {scale} is not a finite number other than 0"


def _low_rank(term: LowRank, shape: Shape, a: Shape, b: Shape) -> Iterator[str]:
    if len(a) != 2 or len(b) != 2 or len(shape) < 2:
        yield f"{term.a} {list(a)}, {term.b} {list(b)}: not a LoRA pair for {list(shape)}"
        return
    rank_a, rank_b = _count(term.a_rows, a[0]), _count(term.b_columns, b[1])
    if rank_a != rank_b or not rank_a:
        yield f"{term.a} {list(a)} and {term.b} {list(b)} have ranks {rank_a} and {rank_b}"
        return
    if term.experts > 1 and rank_a % term.experts:
        yield f"{term.a}: rank {rank_a} is not divisible by {term.experts} experts"
    height, width = (a[1], b[0]) if term.transpose else (b[0], a[1])
    rows, columns = matrix_shape(shape)
    wanted = height * term.experts
    if term.experts > 1:  # a stack of experts cannot be changed in parts
        fits = term.out_start == 0 and rows == wanted
    else:
        fits = term.out_start >= 0 and term.out_start + rows <= wanted
    if width != columns or not fits:
        yield (
            f"{term.b} {list(b)} and {term.a} {list(a)} make {[wanted, width]}, but the output "
            f"needs rows {term.out_start} to {term.out_start + rows} of {columns} columns"
        )


def _count(stride: Stride | None, size: int) -> int:
    return len(range(size)[as_slice(stride)])


def _rows(term: Rows, shape: Shape, values: Shape) -> Iterator[str]:
    if len(shape) < 1 or values != (len(term.indices), *shape[1:]):
        yield f"{term.values}: is {list(values)}, must be {[len(term.indices), *shape[1:]]}"
    if not shape:
        return
    outside = [index for index in term.indices if not 0 <= index < shape[0]]
    if outside:
        yield f"{term.values}: row {outside[0]} is outside {list(shape)}"
    if len(set(term.indices)) != len(term.indices):
        yield f"{term.values}: names a row more than once"
