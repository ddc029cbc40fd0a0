"""Read tensor data once, block by block, at disk speed, with numpy alone.

seen = scan(source)["lm_head.weight"]
seen.nonfinite, seen.is_zero, seen.zero_rows
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.audit.source import Source
from tasks.weights.files.dtypes import ITEM_BITS, all_zero, is_float, largest, magnitude, nonfinite
from tasks.weights.files.tensors import Reader, Tensor

_BLOCK = 2 << 20
"""Bytes to read at a time; longer rows are not examined as rows."""
_THREADS = 4
_SHOWN = 8


@dataclass
class Seen:
    """Statistics of one tensor's data."""

    nonfinite: int = 0  # number of infinite or NaN elements
    is_zero: bool = True  # true if all elements are zero
    # number of matrix rows whose elements are all zero, or all equal to another number
    zero_rows: int = 0
    constant_rows: int = 0
    rows: tuple[int, ...] = ()  # indices of the first few of these rows


def scan(source: Source) -> Mapping[str, Seen]:
    """Scan every tensor that is contiguous; of weights that are not read, those that look empty.

    Raises:
        ArtifactError: a file is shorter than its header says.
    """
    names = [name for name, tensor in source.tensors.items() if tensor.extents]
    if not source.is_read:
        names = [name for name in names if _looks_empty(source.tensors[name])]
    names.sort(key=lambda name: -source.tensors[name].nbytes)
    threads = min(_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(threads) as pool:
        return dict(zip(names, pool.map(partial(_scan, source), names), strict=True))


def _looks_empty(tensor: Tensor) -> bool:
    """Return True if all elements of the first row of a matrix, or a stack of them, are equal."""
    size = ITEM_BITS[tensor.dtype] // 8
    row_bytes = (tensor.shape or (0,))[-1] * size
    if len(tensor.shape) not in (2, 3) or not tensor.numel or not size < row_bytes <= _BLOCK:
        return False
    with Reader(tensor.extents) as reader:
        row = reader.read(0, row_bytes)
    items: NDArray[Any] = row.view(f"<u{size}")
    return all_zero(row, tensor.dtype) or bool((items == items[0]).all())


def _scan(source: Source, name: str) -> Seen:
    tensor, seen = source.tensors[name], Seen()
    row = tensor.nbytes // tensor.shape[0] if len(tensor.shape) == 2 and tensor.numel else 0
    row = row if row <= _BLOCK else 0
    step = _BLOCK // row * row if row else _BLOCK
    buffer: NDArray[np.uint8] = np.empty(min(step, tensor.nbytes), np.uint8)
    with Reader(tensor.extents) as reader:
        for at in range(0, reader.nbytes, step):
            part = buffer[: reader.nbytes - at]
            reader.into(part, at)
            _count(seen, part, tensor.dtype)
            if row:
                _rows(seen, part, row, at // row, tensor.dtype)
    return seen


def _count(seen: Seen, part: NDArray[np.uint8], dtype: str) -> None:
    if not is_float(dtype):
        seen.is_zero &= all_zero(part, dtype)
        return
    top = largest(part, dtype)
    seen.is_zero &= not top
    if not np.isfinite(magnitude(top, dtype)):
        seen.nonfinite += nonfinite(part, dtype)


def _rows(seen: Seen, part: NDArray[np.uint8], row: int, first: int, dtype: str) -> None:
    """Count rows of equal elements; comparing three elements rejects nearly all other rows."""
    size = ITEM_BITS[dtype] // 8
    table: NDArray[Any] = part.view(f"<u{size}").reshape(-1, row // size)
    if table.shape[1] < 2:
        return
    maybe = (table[:, 0] == table[:, 1]) & (table[:, 0] == table[:, -1])
    for index in np.flatnonzero(maybe):
        line = table[index]
        if (line == line[0]).all():
            zero = all_zero(line[:1].view(np.uint8), dtype)
            seen.zero_rows += zero
            seen.constant_rows += not zero
            if len(seen.rows) < _SHOWN:
                seen.rows += (first + int(index),)


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

    One whose elements are not in order counts as different. Raises ArtifactError.
    """
    ours, theirs = (source.tensors[key].extents for source, key in (a, b))
    if not ours or not theirs:
        return True
    with Reader(ours) as first, Reader(theirs) as second:
        for at in range(0, first.nbytes, _BLOCK):
            size = min(_BLOCK, first.nbytes - at)
            if not np.array_equal(first.read(at, size), second.read(at, size)):
                return True
    return False
