"""Tensors without data that record the origin of each of their regions.

transformers converts a checkpoint with a chain of `torch.stack`, `torch.cat`, `torch.transpose` and
`torch.chunk`. Run on `Traced` objects, the same chain tells which box of a live tensor is which box
of which tensor on disk: torch passes each call to `__torch_function__`. A conversion that mixes
elements (rotary permutation, interleaving) cannot be described by boxes and raises
`UntraceableError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


class UntraceableError(Exception):
    """A conversion does something other than moving boxes of elements."""


@dataclass(frozen=True)
class Piece:
    """A box of a tensor on disk, inside a traced tensor. Lists are by axis of the traced tensor.

    Attributes:
        key: key of the tensor on disk.
        shape: shape of the box.
        origin: first index of the box in the traced tensor.
        axes: axis of the tensor on disk; None for an axis that stacking added.
        begin: first index of the box in the tensor on disk.
    """

    key: str
    shape: tuple[int, ...]
    origin: tuple[int, ...]
    axes: tuple[int | None, ...]
    begin: tuple[int, ...]


class Traced:
    """A tensor without data: a shape, and the pieces that fill it."""

    def __init__(self, shape: Sequence[int], pieces: Sequence[Piece]) -> None:
        self.shape = tuple(shape)
        self.pieces = tuple(pieces)

    @classmethod
    def of(cls, key: str, shape: Sequence[int]) -> Traced:
        """Return a full tensor on disk."""
        zeros = (0,) * len(shape)
        axes = tuple(range(len(shape)))
        return cls(shape, [Piece(key, tuple(shape), zeros, axes, zeros)])

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """Return the shape, or the length of one axis."""
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> Traced:
        """Return the tensor itself: memory layout does not matter here."""
        return self

    def transpose(self, dim0: int, dim1: int) -> Traced:
        """Swap two axes, like `torch.transpose`."""
        return _transpose(self, dim0, dim1)

    def squeeze(self) -> Traced:
        """Drop all axes of length 1, like `torch.squeeze`."""
        keep = [axis for axis, size in enumerate(self.shape) if size != 1]
        return _select(self, keep)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise UntraceableError(f"uses Tensor.{name}")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        handler = _HANDLERS.get(name)
        if handler is None:
            raise UntraceableError(f"uses torch.{name}")
        return handler(*args, **(kwargs or {}))


def _select(tensor: Traced, order: Sequence[int]) -> Traced:
    """Return the tensor with the axes in `order`; other axes must have length 1 and are dropped."""

    def pick(values: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(values[axis] for axis in order)

    return Traced(
        pick(tensor.shape),
        [
            Piece(p.key, pick(p.shape), pick(p.origin), pick(p.axes), pick(p.begin))
            for p in tensor.pieces
        ],
    )


def _transpose(tensor: Traced, dim0: int, dim1: int) -> Traced:
    order = list(range(tensor.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return _select(tensor, order)


def _differ(tensors: Sequence[Traced]) -> ValueError:
    """Return the error for shapes that cannot be joined, with one key for each shape."""
    shapes: dict[tuple[int, ...], str] = {}
    for tensor in tensors:
        shapes.setdefault(tensor.shape, tensor.pieces[0].key)
    text = ", ".join(f"{key} {list(shape)}" for shape, key in shapes.items())
    return ValueError(f"cannot join shapes that differ: {text}")


def _cat(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    axis = dim % tensors[0].ndim
    rest = {(*tensor.shape[:axis], *tensor.shape[axis + 1 :]) for tensor in tensors}
    if len(rest) != 1:
        raise _differ(tensors)
    at, pieces = 0, []
    for tensor in tensors:
        pieces += [replace(p, origin=_add(p.origin, axis, at)) for p in tensor.pieces]
        at += tensor.shape[axis]
    return Traced(_put(tensors[0].shape, axis, at), pieces)


def _stack(tensors: Sequence[Traced], dim: int = 0) -> Traced:
    axis = dim % (tensors[0].ndim + 1)

    def widen(values: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
        return (*values[:axis], value, *values[axis:])

    def wide(piece: Piece) -> Piece:
        return Piece(
            piece.key,
            widen(piece.shape, 1),
            widen(piece.origin, 0),
            widen(piece.axes, None),
            widen(piece.begin, 0),
        )

    if len({tensor.shape for tensor in tensors}) != 1:
        raise _differ(tensors)
    widened = [
        Traced(widen(tensor.shape, 1), [wide(p) for p in tensor.pieces]) for tensor in tensors
    ]
    return _cat(widened, axis)


def _chunk(tensor: Traced, chunks: int, dim: int = 0) -> tuple[Traced, ...]:
    axis = dim % tensor.ndim
    whole = tensor.shape[axis]
    size = -(-whole // chunks)
    return tuple(
        _narrow(tensor, axis, start, min(size, whole - start)) for start in range(0, whole, size)
    )


def _narrow(tensor: Traced, axis: int, start: int, length: int) -> Traced:
    pieces = []
    for p in tensor.pieces:
        low = max(p.origin[axis], start)
        high = min(p.origin[axis] + p.shape[axis], start + length)
        if low >= high:
            continue
        pieces.append(
            replace(
                p,
                shape=_put(p.shape, axis, high - low),
                origin=_put(p.origin, axis, low - start),
                begin=_add(p.begin, axis, low - p.origin[axis]),
            )
        )
    return Traced(_put(tensor.shape, axis, length), pieces)


def _put(values: tuple[int, ...], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _add(values: tuple[int, ...], axis: int, by: int) -> tuple[int, ...]:
    return _put(values, axis, values[axis] + by)


_HANDLERS: Mapping[str, Callable[..., Any]] = {
    "cat": _cat,
    "stack": _stack,
    "transpose": _transpose,
    "chunk": _chunk,
}
