"""Flat tensors that are spread over several files, and the byte ranges of their parts."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tasks.weights.files.source import Extent
from tasks.weights.pickled.tensors import TensorRef, TorchFile


@dataclass(frozen=True)
class FullTensor:
    """A full tensor: shape, dtype (safetensors name), and its byte ranges in order."""

    shape: tuple[int, ...]
    dtype: str
    extents: tuple[Extent, ...]


class Flat:
    """Concatenation of flat tensors: one group over all ranks, or all groups of one rank."""

    def __init__(self, parts: Sequence[tuple[TorchFile, TensorRef]]) -> None:
        self._parts = parts
        self._ends = list(accumulate(ref.numel for _, ref in parts))

    @property
    def numel(self) -> int:
        """Total number of elements."""
        return self._ends[-1] if self._ends else 0

    def extents(self, start: int, numel: int) -> list[Extent]:
        """Return the byte ranges of elements `[start, start + numel)`, which must exist."""
        ranges, end = [], start + numel
        index = bisect_right(self._ends, start)
        while start < end:
            file, ref = self._parts[index]
            begin = self._ends[index] - ref.numel
            count = min(end, self._ends[index]) - start
            if count:
                ranges.append(file.extent(ref, start - begin, count))
            start, index = start + count, index + 1
        return ranges
