"""The adapter that all tokens of a rollout use, as products that are packed once a hand-off.

vLLM keeps an adapter's matrices in places of their own and copies the next adapter over them. Here
each place is packed for oneDNN at its first use; what the adapter does not train is not computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tasks.serving.cpu_linear import Product, packed

JOINED_RANK = 32
"""Up to it the parts of a layer (q, k, v) share one second product, with zeros between them: less
to compute than three calls cost. A rank of 64 already computes too many zeros."""
ROWS = 256
"""Rows at a time, so that what lies between the products of a long prompt stays in the cache."""

Stacked = tuple[torch.Tensor, ...]
"""Of each part of a layer's output: (slots, 1, rank, i), or (slots, 1, width, rank)."""


@dataclass(frozen=True)
class Part:
    """A part of a layer's output.

    Attributes:
        product: (rows, rank) to (rows, width).
        ranks: of the numbers that the first product makes, those that it takes.
        columns: of the output.
    """

    product: Product
    ranks: slice
    columns: slice

    def add(self, y: torch.Tensor, inner: torch.Tensor) -> None:
        """Add it to `y` in place, made of what the first product has made."""
        found = self.product(inner[:, self.ranks])
        y[:, self.columns].add_(found)  # += would copy it onto itself too


@dataclass(frozen=True)
class Layer:
    """What the adapter adds to one layer.

    Attributes:
        first: (rows, i) to (rows, parts * rank).
        parts: what it trains of it; a single one where they are joined.
    """

    first: Product
    parts: Sequence[Part]

    def add(self, y: torch.Tensor, x: torch.Tensor, scale: float) -> None:
        """Add it to `y` (rows, o) in place, made of `x` (rows, i)."""
        if x.shape[0] > ROWS:
            for some, made_of in zip(y.split(ROWS), x.split(ROWS), strict=True):
                self.add(some, made_of, scale)
            return
        inner = self.first(x)
        if scale != 1:
            inner *= scale
        for one in self.parts:
            one.add(y, inner)


class PackedAdapter:
    """Layers by the place in memory of their matrices, and the slot within.

    `forget` has to be called whenever vLLM is given another adapter.
    """

    def __init__(self) -> None:
        self._layers: dict[tuple[int, int], Layer | None] = {}

    def forget(self) -> None:
        """Another adapter: pack anew."""
        self._layers.clear()

    def layer(
        self, firsts: Stacked, seconds: Stacked, slot: int, widths: Sequence[int]
    ) -> Layer | None:
        """What the adapter in a slot adds to a layer; None: nothing."""
        key = (seconds[0].data_ptr(), slot)
        if key not in self._layers:
            first = torch.cat([one[slot].flatten(0, -2) for one in firsts])
            each = [one[slot].flatten(0, -2) for one in seconds]
            self._layers[key] = _pack(first, each, widths)
        return self._layers[key]


PACKED = PackedAdapter()
"""Of this process's engine; a process has one."""


def _pack(
    first: torch.Tensor, seconds: Sequence[torch.Tensor], widths: Sequence[int]
) -> Layer | None:
    rank, begin, trained = len(first) // len(seconds), 0, []
    for part, (matrix, width) in enumerate(zip(seconds, widths, strict=True)):
        wide = min(width, len(matrix))  # adapter and model may be padded differently
        if matrix.any():
            ranks, columns = slice(part * rank, (part + 1) * rank), slice(begin, begin + wide)
            trained.append((matrix[:wide], ranks, columns))
        begin += width
    if not trained:
        return None
    if rank > JOINED_RANK:
        return Layer(packed(first), [Part(packed(matrix), *at) for matrix, *at in trained])
    joined = first.new_zeros(begin, len(first))
    for matrix, ranks, columns in trained:
        joined[columns, ranks] = matrix
    return Layer(packed(first), [Part(packed(joined), slice(None), slice(None))])
