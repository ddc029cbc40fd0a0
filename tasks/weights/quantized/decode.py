"""Decode packed matrices: one fp32 product and one rounding per element, on any CPU.

The bits are those of bitsandbytes, but its library is not called. Up to 0.50.2 its AVX-512 kernel
uses wrong scales if a row is not a whole number of blocks (SigLIP has 4304 columns; the CUDA
kernels are right), and other cases go through `torch.compile`, which takes seconds per shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.weights.files.dtype_conversion import cast
from tasks.weights.files.file_ranges import Reader
from tasks.weights.files.source import Extent
from tasks.weights.quantized.fp8 import FP8, scaled_values
from tasks.weights.quantized.packed import LEVELS, NESTED_SCALES, NESTED_TABLE, SCALES

if TYPE_CHECKING:
    import torch

_STEP = 1 << 20
"""Elements per step: a multiple of every block size."""


def decoded(stored: Mapping[str, Any], extents: Sequence[Extent]) -> torch.Tensor:
    """Decode a matrix, in the dtype that it was packed from.

    Args:
        stored: `Packed.as_json` or `Scaled.as_json`, and "turned": True to return the transpose.
        extents: byte ranges of its parts, one after the other; bytes beyond them are not read.

    Raises:
        ArtifactError: a file cannot be read.
    """
    import torch

    if stored["type"] == FP8:
        return torch.from_numpy(decoded_values(stored, extents))
    packed, scales = _parts(stored, extents)
    out = torch.empty(prod(stored["shape"]), dtype=getattr(torch, stored["dtype"]))
    unpack(packed, scales, out, kind=stored["type"], blocksize=stored["blocksize"])
    matrix = out.reshape(stored["shape"])
    return matrix.t().contiguous() if stored["turned"] else matrix


def decoded_values(stored: Mapping[str, Any], extents: Sequence[Extent]) -> NDArray[np.float32]:
    """Decode the same matrix to fp32 values that are rounded to its dtype, without torch.

    Args and Raises as for `decoded`.
    """
    if stored["type"] == FP8:
        return scaled_values(stored, _read(stored["parts"], extents))
    packed, scales = _parts(stored, extents)
    out = np.empty(prod(stored["shape"]), np.float32)
    dtype = _SHORT[stored["dtype"]]
    for first, values in _values(
        packed, scales, out.size, kind=stored["type"], blocksize=stored["blocksize"]
    ):
        narrow = cast(values.view(np.uint8), "F32", dtype)
        out[first : first + values.size] = cast(narrow, dtype, "F32").view(np.float32)
    matrix = out.reshape(stored["shape"])
    return np.ascontiguousarray(matrix.T) if stored["turned"] else matrix


_SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def _parts(
    stored: Mapping[str, Any], extents: Sequence[Extent]
) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Read the packed elements, uint8, and the scale of every block, fp32."""
    parts = _read(stored["parts"], extents)
    scales, nested = parts[SCALES], stored["nested"]
    if nested is None:
        return parts[""], scales.view(np.float32)
    return parts[""], unpack_scales(
        scales,
        parts[NESTED_TABLE].view(np.float32),
        parts[NESTED_SCALES].view(np.float32),
        blocksize=nested["blocksize"],
        offset=nested["offset"],
    )


def unpack(
    packed: NDArray[np.uint8],
    scales: NDArray[np.float32],
    out: torch.Tensor,
    *,
    kind: str,
    blocksize: int,
) -> None:
    """Fill `out` with the decoded values: level times the scale of the block, rounded once.

    Args:
        packed: two elements per byte, the first in the high half.
        scales: one per block of the flattened matrix.
        out: 1-D float tensor.
        kind: "nf4" or "fp4".
        blocksize: elements per block; divides `_STEP`.
    """
    import torch

    for first, values in _values(packed, scales, out.numel(), kind=kind, blocksize=blocksize):
        out[first : first + values.size] = torch.from_numpy(values)


def _values(
    packed: NDArray[np.uint8],
    scales: NDArray[np.float32],
    count: int,
    *,
    kind: str,
    blocksize: int,
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (first element, values in fp32) of consecutive steps."""
    pairs = _pairs(kind)
    for first in range(0, count, _STEP):
        end = min(first + _STEP, count)
        values = pairs[packed[first // 2 : -(-end // 2)]].view(np.float32)[: end - first]
        whole = values.size // blocksize * blocksize
        of_step = scales[first // blocksize : -(-end // blocksize)]
        values[:whole].reshape(-1, blocksize)[...] *= of_step[: whole // blocksize, None]
        values[whole:] *= of_step[-1]
        yield first, values


def unpack_scales(
    packed: NDArray[np.uint8],
    table: NDArray[np.float32],
    scales: NDArray[np.float32],
    *,
    blocksize: int,
    offset: float,
) -> NDArray[np.float32]:
    """Decode scales that were packed in 8 bits: `table[packed] * scale + offset`, in fp32.

    Args:
        packed: one byte per scale.
        table: the 256 values that a byte encodes.
        scales: one per block of scales.
        blocksize: scales per block.
        offset: added to every scale.
    """
    values: NDArray[np.float32] = table[packed]
    values *= np.repeat(scales, blocksize)[: values.size]
    values += np.float32(offset)
    return values


def _pairs(kind: str) -> NDArray[np.uint64]:
    """Return a table of 256 words: the two fp32 values that each byte encodes."""
    levels = np.array(LEVELS[kind], np.float32)
    byte = np.arange(256)
    both = np.stack([levels[byte >> 4], levels[byte & 15]], axis=1)
    return both.view(np.uint64).reshape(256)


def _read(
    sizes: Sequence[Sequence[Any]], extents: Sequence[Extent]
) -> dict[str, NDArray[np.uint8]]:
    """Read every part into its own memory, so that it is aligned; by suffix."""
    parts: dict[str, NDArray[np.uint8]] = {}
    at = 0
    with Reader(extents) as reader:
        for suffix, size in sizes:
            parts[suffix] = reader.read(at, size)
            at += size
    return parts
