"""Carrying a term from a tensor in memory to the tensor on disk that is a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from tasks.core.contract import TensorLike
from tasks.weights.families.places import Place
from tasks.weights.plan.adapter_ops import Add, Dora, LowRank, Term


def carry(term: Term, place: Place, operands: Mapping[str, TensorLike]) -> Term:
    """The term as it acts on the tensor on disk.

    Args:
        term: of the live tensor.
        place: where the tensor on disk lies in it.
        operands: adapter tensors by the names that terms have for them.

    Raises:
        ValueError: the term has no such form: its arithmetic needs more than the part.
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
                f"{place.live}: DoRA takes norms over all of its rows, {place.disk} holds a part"
            )
        return replace(term, out_start=term.out_start + row)
    if term.experts > 1:
        term = term.of_expert(expert, operands[term.a].shape[0])
    elif expert:
        raise ValueError(f"{place.live}: stacks experts, {term.a} is for a single matrix")
    if not place.transpose:
        return replace(term, out_start=term.out_start + row)
    if prod(place.shape) != prod(place.live_shape[-2:]):
        raise ValueError(f"{place.disk}: a transposed part of {place.live}")
    return _turned(term)


def _turned(term: Term) -> Term:
    """The term of the transposed tensor."""
    if isinstance(term, LowRank | Dora):
        return replace(term, transpose=not term.transpose)
    raise ValueError(f"{term.kind} on a tensor that is stored transposed")


def _row(place: Place) -> tuple[int, int]:
    """The expert whose matrix holds the part, and the row of that matrix where it begins.

    Raises:
        ValueError: a part that is not some whole rows of one matrix.
    """
    *stack, rows, columns = 1, 1, *place.live_shape
    row, column = divmod(place.start, columns)
    expert, row = divmod(row, rows)
    height, rest = divmod(prod(place.shape), columns)
    if column or rest or row + height > rows or prod(stack) != prod(place.live_shape[:-2]):
        raise ValueError(f"{place.disk}: is no block of rows of one matrix of {place.live}")
    return expert, row
