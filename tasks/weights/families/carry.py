"""Translate a term of a tensor in memory to the tensor on disk that is a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from tasks.core.contract import TensorLike
from tasks.weights.families.places import Place
from tasks.weights.plan.adapter_ops import Add, Dora, LowRank, Term


def carry(term: Term, place: Place, operands: Mapping[str, TensorLike]) -> Term:
    """Return the term for the tensor on disk.

    Args:
        term: term of the live tensor.
        place: place of the tensor on disk in the live tensor.
        operands: adapter tensors by their names in terms.

    Raises:
        ValueError: there is no such term, because the arithmetic needs more than the part.
    """
    if place.is_all:
        return _turned(term) if place.transpose else term
    if not isinstance(term, LowRank | Dora):
        kind = "a bias" if isinstance(term, Add) else "trained rows"
        raise ValueError(f"{place.live}: {kind} on a tensor that is stored in parts")
    expert, row = _row(place)
    if isinstance(term, Dora):
        if expert or term.transpose or place.transpose:
            raise ValueError(
                f"{place.live}: DoRA needs the norms of all rows, but {place.disk} is only a part"
            )
        return replace(term, out_start=term.out_start + row)
    if term.experts > 1:
        term = term.of_expert(expert, operands[term.a].shape[0])
    elif expert:
        raise ValueError(f"{place.live}: a stack of experts, but {term.a} is for one matrix")
    if not place.transpose:
        return replace(term, out_start=term.out_start + row)
    if prod(place.shape) != prod(place.live_shape[-2:]):
        raise ValueError(f"{place.disk}: a transposed part of {place.live} cannot be changed")
    return _turned(term)


def _turned(term: Term) -> Term:
    """Return the term for the transposed tensor."""
    if isinstance(term, LowRank | Dora):
        return replace(term, transpose=not term.transpose)
    raise ValueError(f"{term.kind}: not supported on a tensor that is stored transposed")


def _row(place: Place) -> tuple[int, int]:
    """Return the expert whose matrix contains the part, and the part's first row in that matrix.

    Raises:
        ValueError: the part is not a block of full rows of one matrix.
    """
    *stack, rows, columns = 1, 1, *place.live_shape
    row, column = divmod(place.start, columns)
    expert, row = divmod(row, rows)
    height, rest = divmod(prod(place.shape), columns)
    if column or rest or row + height > rows or prod(stack) != prod(place.live_shape[:-2]):
        raise ValueError(f"{place.disk}: is not a block of rows of one matrix of {place.live}")
    return expert, row
