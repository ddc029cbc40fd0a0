"""Read tensor data once, block by block, at disk speed, with numpy alone.

seen = scan(source, source.tensors, hashed=())["lm_head.weight"]
seen.nonfinite, seen.is_zero, seen.zero_rows
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from tasks.audit.source import Source
from tasks.weights.files.dtypes import ITEM_BITS, all_zero, is_float, largest, magnitude, nonfinite
from tasks.weights.files.source import Reader

_BLOCK = 2 << 20
"""Bytes to read at a time; longer rows are not examined as rows."""
_THREADS = 4
_SHOWN = 8


@dataclass
class Seen:
    """Statistics of one tensor's data.

    Attributes:
        nonfinite: number of infinite or NaN elements.
        largest: largest magnitude, encoded as `dtypes.largest` returns it.
        is_zero: True if all elements are zero.
        zero_rows, constant_rows: number of matrix rows whose elements are all zero, or all equal
            to another number.
        rows: indices of the first few of these rows.
        checksum: hash of its bytes; "" if not requested.
    """

    dtype: str
    nonfinite: int = 0
    largest: int = 0
    is_zero: bool = True
    zero_rows: int = 0
    constant_rows: int = 0
    rows: tuple[int, ...] = ()
    checksum: str = ""

    @property
    def magnitude(self) -> float:
        """Largest magnitude as a number; 0 if the dtype is not a float."""
        return magnitude(self.largest, self.dtype) if is_float(self.dtype) else 0.0


def scan(source: Source, names: Collection[str], *, hashed: Collection[str]) -> Mapping[str, Seen]:
    """Scan every named tensor that is contiguous, and hash those in `hashed`.

    Raises:
        ArtifactError: a file is shorter than its header says.
    """
    ordered = [name for name in names if source.tensors[name].start >= 0]
    ordered.sort(key=lambda name: (-source.tensors[name].nbytes, source.tensors[name].file, name))
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(ordered, pool.map(partial(_scan, source, hashed), ordered), strict=True))


def _scan(source: Source, hashed: Collection[str], name: str) -> Seen:
    """Read, examine and hash one tensor, block by block."""
    tensor = source.tensors[name]
    seen, digest = Seen(tensor.dtype), blake3() if name in hashed else None
    row = tensor.nbytes // tensor.shape[0] if len(tensor.shape) == 2 and tensor.numel else 0
    row = row if row <= _BLOCK else 0
    step = _BLOCK // row * row if row else _BLOCK
    buffer: NDArray[np.uint8] = np.empty(min(step, tensor.nbytes), np.uint8)
    with Reader(source.extents(name)) as reader:
        for at in range(0, reader.nbytes, step):
            part = buffer[: reader.nbytes - at]
            reader.into(part, at)
            _count(seen, part)
            if row:
                _rows(seen, part, row, at // row)
            if digest is not None:
                digest.update(part)
    seen.checksum = digest.hexdigest() if digest is not None else ""
    return seen


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
    """Count rows of equal elements; comparing three elements rejects nearly all other rows."""
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


_PART = 4 << 20


def first_difference(source: Source, reference: Source, keys: Iterable[str]) -> str | None:
    """Return the first key whose bytes differ between two folders; None if there is none.

    Matrices of layers come first, because adapters change them: a merged model needs few reads.
    Raises ArtifactError if a file cannot be read, or a tensor is not contiguous.
    """
    order = sorted(
        keys, key=lambda key: (len(source.tensors[key].shape) < 2, "proj" not in key, key)
    )
    return next((key for key in order if differ((source, key), (reference, key))), None)


def same_header(key: str, source: Source, reference: Source) -> bool:
    """Return True if both folders have the tensor, with the same shape and dtype."""
    tensor, other = source.tensors[key], reference.tensors.get(key)
    return other is not None and (tensor.shape, tensor.dtype) == (other.shape, other.dtype)


def differ(a: tuple[Source, str], b: tuple[Source, str]) -> bool:
    """Return True if two tensors of the same size, each as (folder, key), differ in any byte.

    Raises ArtifactError if a file cannot be read, or a tensor is not contiguous.
    """
    (source, key), (source2, key2) = a, b
    total = source.tensors[key].nbytes
    left: NDArray[np.uint8] = np.empty(min(_PART, total), np.uint8)
    right = np.empty_like(left)
    with Reader(source.extents(key)) as first, Reader(source2.extents(key2)) as second:
        for at in range(0, total, _PART):
            size = min(_PART, total - at)
            first.into(left[:size], at)
            second.into(right[:size], at)
            if not np.array_equal(left[:size], right[:size]):
                return True
    return False
