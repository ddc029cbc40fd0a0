"""Flat tensors that lie in several files, and the ranges that a part of them is made of."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tasks.weights.files.source import Extent
from tasks.weights.pickled.tensors import TensorRef, TorchFile


@dataclass(frozen=True)
class Whole:
    """One tensor of the checkpoint: what it is, and the ranges that make it."""

    shape: tuple[int, ...]
    dtype: str
    extents: tuple[Extent, ...]


class Flat:
    """Flat tensors, one after the other: a group over all ranks, or a rank over all groups."""

    def __init__(self, parts: Sequence[tuple[TorchFile, TensorRef]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(ref.numel for _, ref in parts))

    @property
    def numel(self) -> int:
        """Number of elements of all together."""
        return self._ends[-1] if self._ends else 0

    def extents(self, start: int, numel: int) -> list[Extent]:
        """The ranges that make elements [start, start + numel). They have to be there."""
        found, end = [], start + numel
        index = bisect_right(self._ends, start)
        while start < end:
            file, ref = self._parts[index]
            begin = self._ends[index] - ref.numel
            count = min(end, self._ends[index]) - start
            if count:
                found.append(file.extent(ref, start - begin, count))
            start, index = start + count, index + 1
        return found
