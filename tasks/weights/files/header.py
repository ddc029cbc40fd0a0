"""Read and check safetensors headers: the place of every tensor in a file.

A file has 8 bytes of little-endian header length, a JSON header, then the tensor bytes. The checks
are those of the safetensors library, because a plan is built from headers alone and an unchanged
file is served as it is: every tensor has the size that shape and dtype imply, and tensors fill the
file without gap or overlap.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.core.files import open_regular
from tasks.weights.files.documents import parse_json
from tasks.weights.files.dtypes import ITEM_BITS

MAX_HEADER_BYTES = 100_000_000
"""Limit of the safetensors library."""
MAX_AXES = 64
"""Limit of torch; it bounds the time that the product of a shape takes."""
_MAX_COUNT = 1 << 63


@dataclass(frozen=True)
class TensorInfo:
    """Header entry of one tensor. `start` and `end` are absolute byte offsets in the file."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """Header of one file: its tensors in file order, `__metadata__`, offset of the first tensor."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file. Raises ArtifactError."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ArtifactError(f"{path}: truncated safetensors: {size} bytes, no header")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise ArtifactError(
                    f"{path}: truncated or not safetensors: "
                    f"header claims {length} bytes, the file has {size}"
                )
            raw = parse_json(file.read(length), unique=True)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ArtifactError(f"{path}: header is not JSON: {error}") from error
    return _parse(path, raw, 8 + length, size)


def _integer(value: object) -> int:
    if type(value) is not int:  # int() would accept 2.5, "2" and True
        raise TypeError(f"{value!r} is not an integer")
    return value


def _parse(path: Path, raw: object, data_start: int, size: int) -> Header:
    if not isinstance(raw, dict):
        raise ArtifactError(f"{path}: header is not a JSON object")
    metadata = raw.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ArtifactError(f"{path}: __metadata__ is not a JSON object of strings")
    tensors: dict[str, TensorInfo] = {}
    for name, entry in raw.items():
        if not name.isprintable():  # it would reach terminals, logs and file names
            raise ArtifactError(f"{path}: a tensor's name has control characters: {name!a:.200}")
        try:
            shape = tuple(_integer(n) for n in entry["shape"])
            dtype = str(entry["dtype"])
            begin, end = (_integer(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: malformed header entry for {name}") from error
        if len(shape) > MAX_AXES or any(not 0 <= n < _MAX_COUNT for n in shape):
            raise ArtifactError(f"{path}: {name} has an invalid shape of {len(shape)} axes")
        if dtype not in ITEM_BITS:
            raise ArtifactError(f"{path}: {name} has unknown dtype {dtype}, shape {list(shape)}")
        if end - begin != math.prod(shape) * ITEM_BITS[dtype] // 8 or begin < 0:
            raise ArtifactError(
                f"{path}: {name} spans {end - begin} bytes, but {dtype} {list(shape)} needs "
                f"{math.prod(shape) * ITEM_BITS[dtype] // 8}"
            )
        if data_start + end > size:
            raise ArtifactError(
                f"{path}: truncated: {name} ends at byte {data_start + end}, the file has {size}"
            )
        tensors[name] = TensorInfo(shape, dtype, data_start + begin, data_start + end)
    _require_gapless(path, tensors, data_start, size)
    return Header(tensors, metadata, data_start)


def _require_gapless(path: Path, tensors: dict[str, TensorInfo], start: int, size: int) -> None:
    """Refuse gaps and overlaps between tensors, as the safetensors library does."""
    at, last = start, "the header"
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start < at:
            raise ArtifactError(f"{path}: {name} and {last} overlap")
        if info.start > at:
            gap = info.start - at
            raise ArtifactError(f"{path}: {gap} bytes before {name} belong to no tensor")
        at, last = info.end, name
    if at != size:
        raise ArtifactError(f"{path}: {size - at} bytes after {last} belong to no tensor")
