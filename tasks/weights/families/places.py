"""Places: where a tensor on disk lies in a tensor of the model in memory. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from tasks.weights.adapters.live import Stored
from tasks.weights.families.traced import Piece, Traced


@dataclass(frozen=True)
class Place:
    """A tensor on disk, or a part of one, is a contiguous part of a live tensor.

    Attributes:
        disk: key in the checkpoint. shape: of that tensor.
        live: name in memory. live_shape: of that tensor.
        start: element of the flattened live tensor at which it begins.
        transpose: the last two axes are swapped between the two.
        whole: the whole disk tensor lies there; False where memory splits what disk fuses.
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
        """Whether it is all of the live tensor."""
        return self.whole and prod(self.shape) == prod(self.live_shape)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Place:
        """What `dataclasses.asdict` made, or what JSON made of that."""
        shapes = {key: tuple(raw[key]) for key in ("shape", "live_shape")}
        return cls(**{**raw, **shapes})


def places_of(live: str, traced: Traced, disk: Mapping[str, tuple[int, ...]]) -> list[Place]:
    """The places of a live tensor's pieces.

    Args:
        live: its name.
        traced: what the conversion made for it.
        disk: shape of every tensor on disk.

    Raises:
        ValueError: a piece that is not contiguous in the live tensor.
    """
    return [_place(live, traced.shape, piece, disk[piece.key]) for piece in traced.pieces]


def stored_names(places: Iterable[Place]) -> dict[str, Stored]:
    """What `LiveModel.stored` says: keys on disk that are no live name, or only a part of one."""
    found: dict[str, list[Place]] = {}
    for place in places:
        found.setdefault(place.disk, []).append(place)
    live = {place.live for ones in found.values() for place in ones}
    return {
        key: Stored(
            ones[0].shape,
            tuple(one.live for one in ones),
            whole=len(ones) == 1 and ones[0].is_all and not ones[0].transpose,
        )
        for key, ones in found.items()
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
    """Whether a box is one run of the flattened tensor: all of the axes after the first it cuts."""
    cut = [axis for axis, (part, size) in enumerate(zip(box, whole, strict=True)) if part < size]
    return not cut or all(size == 1 for size in box[: cut[-1]])
