"""Places of tensors on disk within tensors in memory, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from tasks.weights.adapters.live import Stored
from tasks.weights.families.traced import Piece, Traced


@dataclass(frozen=True)
class Place:
    """The place of a tensor on disk, or of a part of it: a contiguous part of a live tensor.

    Attributes:
        disk: key in the checkpoint.
        shape: shape of the tensor on disk.
        live: name in memory.
        live_shape: shape of the tensor in memory.
        start: first element in the flattened live tensor.
        transpose: True if the last two axes are swapped between disk and memory.
        whole: True for the full tensor on disk, False if memory splits a tensor that disk fuses.
    """

    disk: str
    shape: tuple[int, ...]
    live: str
    live_shape: tuple[int, ...]
    start: int = 0
    transpose: bool = False
    whole: bool = True

    @property
    def is_all(self) -> bool:
        """Return True if disk and memory hold the same elements."""
        return self.whole and prod(self.shape) == prod(self.live_shape)


def places_of(live: str, traced: Traced, disk: Mapping[str, tuple[int, ...]]) -> list[Place]:
    """Return the places of the tensors on disk that make a live tensor.

    Args:
        live: name of the live tensor.
        traced: result of the conversion for it.
        disk: shape of every tensor on disk, by key.

    Raises:
        ValueError: a piece is not contiguous in the live tensor.
    """
    return [_place(live, traced.shape, piece, disk[piece.key]) for piece in traced.pieces]


def stored_names(places: Iterable[Place]) -> dict[str, Stored]:
    """Return `LiveModel.stored`: the tensors on disk whose key is not a live name, by key."""
    by_key: dict[str, list[Place]] = {}
    for place in places:
        by_key.setdefault(place.disk, []).append(place)
    live = {place.live for group in by_key.values() for place in group}
    return {
        key: Stored(
            group[0].shape,
            tuple(place.live for place in group),
            whole=len(group) == 1 and group[0].is_all and not group[0].transpose,
        )
        for key, group in by_key.items()
        if key not in live
    }


def _place(live: str, live_shape: tuple[int, ...], piece: Piece, shape: tuple[int, ...]) -> Place:
    if not _contiguous(piece.shape, live_shape):
        raise ValueError(f"{piece.key} is scattered over {live}")
    order = [axis for axis in piece.axes if axis is not None]
    straight = sorted(order)
    swapped = [*straight[:-2], *straight[-1:-3:-1]]
    if order not in (straight, swapped):
        raise ValueError(f"{piece.key} lies in {live} with its axes in the order {order}")
    start = 0
    for size, at in zip(live_shape, piece.origin, strict=True):
        start = start * size + at
    return Place(
        disk=piece.key,
        shape=shape,
        live=live,
        live_shape=live_shape,
        start=start,
        transpose=order != straight,
        whole=prod(piece.shape) == prod(shape),
    )


def _contiguous(box: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Return True if a box of a tensor is contiguous in the flattened tensor."""
    cut = [axis for axis, (part, size) in enumerate(zip(box, whole, strict=True)) if part < size]
    return not cut or all(size == 1 for size in box[: cut[-1]])
