"""Tensor data, looked at once, block by block, at the speed of the disk, with numpy alone.

seen = scan(source, source.tensors)["lm_head.weight"]
seen.nonfinite, seen.is_zero, seen.zero_rows
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.audit.source import Source
from tasks.weights.files.dtype_bits import all_zero, is_float, largest, magnitude, nonfinite
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.header import ITEM_BITS
from tasks.weights.native.hashing import LANES, advance, side_by_side, stream

_BLOCK = 2 << 20
"""Bytes read at a time; a row that is longer is not looked at as a row."""
_THREADS = 4
_SHOWN = 8


@dataclass
class Seen:
    """What one tensor's data is like.

    Attributes:
        nonfinite: how many elements are infinite or NaN.
        largest: the largest magnitude, as `bits.largest` gives it.
        is_zero: whether every element is.
        zero_rows, constant_rows: how many rows of a matrix are zero, or one number other than zero.
        rows: the first few of them.
        sha256: of its bytes; "" where nobody asked.
    """

    dtype: str
    nonfinite: int = 0
    largest: int = 0
    is_zero: bool = True
    zero_rows: int = 0
    constant_rows: int = 0
    rows: tuple[int, ...] = ()
    sha256: str = ""

    @property
    def magnitude(self) -> float:
        """The largest magnitude as a number; 0 for what is no float."""
        return magnitude(self.largest, self.dtype) if is_float(self.dtype) else 0.0


def scan(source: Source, names: Collection[str], *, hashed: bool = False) -> Mapping[str, Seen]:
    """Look at every named tensor whose elements lie in order.

    Args:
        source: the folder.
        names: of its tensors.
        hashed: take sha256 too.

    Raises:
        ArtifactError: a file that is shorter than its header says.
    """
    ordered = [one for one in names if source.tensors[one].start >= 0]
    # Side by side as long as all of them last: so those of a size together.
    ordered.sort(key=lambda one: (-source.tensors[one].nbytes, source.tensors[one].file, one))
    size = LANES if hashed and side_by_side() else 1
    groups = [ordered[at : at + size] for at in range(0, len(ordered), size)]
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    found: dict[str, Seen] = {}
    with ThreadPoolExecutor(threads) as pool:
        for group in pool.map(partial(_group, source, hashed), groups):
            found |= group
    return found


def _group(source: Source, hashed: bool, names: Sequence[str]) -> dict[str, Seen]:
    """Look at a few tensors in step, so that their hashes advance in the lanes of one vector."""
    looks = [_Look(source, name, hashed) for name in names]
    left = looks
    with ExitStack() as files:
        for one in looks:
            files.callback(one.close)
        while left := [one for one in left if one.goes_on]:
            pairs = [(one.digest, one.block()) for one in left]
            advance([(digest, block) for digest, block in pairs if digest is not None])
    return {name: one.seen for name, one in zip(names, looks, strict=True)}


class _Look:
    """One tensor, looked at block by block."""

    def __init__(self, source: Source, name: str, hashed: bool) -> None:
        held = source.tensors[name]
        self.seen = Seen(held.dtype)
        self.digest = stream() if hashed else None
        row = held.nbytes // held.shape[0] if len(held.shape) == 2 and held.numel else 0
        self._row = row if row <= _BLOCK else 0
        step = _BLOCK // row * row if self._row else _BLOCK
        self._left: NDArray[np.uint8] = np.empty(min(step, held.nbytes), np.uint8)
        self._reader = Reader(source.extents(name))
        self._at = 0

    @property
    def goes_on(self) -> bool:
        """Whether there is more of it."""
        return self._at < self._reader.nbytes

    def block(self) -> NDArray[np.uint8]:
        """Read and look at the next block; it is good until the one after it."""
        part = self._left[: self._reader.nbytes - self._at]
        self._reader.into(part, self._at)
        _count(self.seen, part)
        if self._row:
            _rows(self.seen, part, self._row, self._at // self._row)
        self._at += part.size
        return part

    def close(self) -> None:
        """Close its file, take its hash."""
        self._reader.__exit__()
        self.seen.sha256 = self.digest.hexdigest() if self.digest is not None else ""


def _count(seen: Seen, part: NDArray[np.uint8]) -> None:
    if not is_float(seen.dtype):
        seen.is_zero &= all_zero(part, seen.dtype)
        return
    top = largest(part, seen.dtype)
    seen.is_zero &= not top
    seen.largest = max(seen.largest, top)
    if not np.isfinite(magnitude(top, seen.dtype)):
        seen.nonfinite += nonfinite(part, seen.dtype)


def _rows(seen: Seen, part: NDArray[np.uint8], row: int, first: int) -> None:
    """Rows that are one element over and over; three elements tell of nearly all others."""
    size = ITEM_BITS[seen.dtype] // 8
    table: NDArray[Any] = part.view(f"<u{size}").reshape(-1, row // size)
    if table.shape[1] < 2:
        return
    maybe = (table[:, 0] == table[:, 1]) & (table[:, 0] == table[:, -1])
    for index in np.flatnonzero(maybe):
        line = table[index]
        if (line == line[0]).all():
            zero = all_zero(line[:1].view(np.uint8), seen.dtype)
            seen.zero_rows += zero
            seen.constant_rows += not zero
            if len(seen.rows) < _SHOWN:
                seen.rows += (first + int(index),)
