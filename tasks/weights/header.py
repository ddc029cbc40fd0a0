"""safetensors headers: where every tensor of a file lies, read and checked without tensor data.

Layout of a file: 8 bytes little-endian header length, a JSON header, then the tensor bytes. The
checks here are stricter than a loader needs, because a plan is built from headers alone: tensors
have to be within the file, must not overlap, and must have the size that shape and dtype imply.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from tasks.errors import ArtifactError

ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
"""The same limit as the safetensors library has."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's entry. `start` and `end` are absolute byte offsets in the file."""

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
    """A whole file's header: tensors by name, in file order, and the free-form metadata."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file.

    Raises:
        ArtifactError: naming the file and what is wrong with it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise ArtifactError(f"{path}: truncated safetensors: {size} bytes, no header")
            (length,) = struct.unpack("<Q", prefix)
            if length > MAX_HEADER_BYTES or 8 + length > size:
                raise ArtifactError(
                    f"{path}: truncated or not safetensors: "
                    f"header claims {length} bytes, the file has {size}"
                )
            raw = json.loads(file.read(length), object_pairs_hook=_once)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path}: header is not JSON: {error}") from error
    return _parse(path, raw, 8 + length, size)


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; a key that comes twice is refused, where json would keep the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)} comes twice")
    return found


def _integer(value: object) -> int:
    if type(value) is not int:  # int() would accept 2.5, "2" and True
        raise TypeError(f"{value!r} is no integer")
    return value


def _parse(path: Path, raw: object, data_start: int, size: int) -> Header:
    if not isinstance(raw, dict):
        raise ArtifactError(f"{path}: header is not a JSON object")
    metadata = raw.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise ArtifactError(f"{path}: __metadata__ is not a JSON object")
    tensors: dict[str, TensorInfo] = {}
    for name, entry in raw.items():
        try:
            shape = tuple(_integer(n) for n in entry["shape"])
            dtype = str(entry["dtype"])
            begin, end = (_integer(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{path}: malformed header entry for {name}") from error
        if dtype not in ITEM_BITS or any(n < 0 for n in shape):
            raise ArtifactError(f"{path}: {name} has dtype {dtype}, shape {list(shape)}")
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
    _refuse_overlap(path, tensors)
    return Header(tensors, {str(k): str(v) for k, v in metadata.items()}, data_start)


def _refuse_overlap(path: Path, tensors: dict[str, TensorInfo]) -> None:
    last_end, last_name = 0, ""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.nbytes and info.start < last_end:
            raise ArtifactError(f"{path}: {name} and {last_name} overlap")
        if info.nbytes:
            last_end, last_name = info.end, name
