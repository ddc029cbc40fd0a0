"""Read and check safetensors headers: the place of every tensor in a file.

A file has 8 bytes of little-endian header length, a JSON header, then the tensor bytes. The
safetensors library checks it: every tensor has the size that shape and dtype imply, and tensors
fill the file without gap or overlap. It tells no offsets, so the header is parsed here as well.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from tasks.core.errors import ArtifactError
from tasks.core.files import open_regular
from tasks.weights.files.dtypes import ITEM_BITS


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
        with open_regular(path) as file, safe_open(path, framework="numpy"):
            (length,) = struct.unpack("<Q", file.read(8))
            entries = json.loads(file.read(length))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except SafetensorError as error:
        raise ArtifactError(f"{path}: truncated, damaged or not safetensors: {error}") from error
    metadata = entries.pop("__metadata__", None) or {}
    start, tensors = 8 + length, {}
    for name, entry in entries.items():
        if not name.isprintable():  # it would reach terminals, logs and file names
            raise ArtifactError(f"{path}: a tensor's name has control characters: {name!a:.200}")
        shape, dtype = tuple(entry["shape"]), entry["dtype"]
        if dtype not in ITEM_BITS:
            raise ArtifactError(f"{path}: {name} has unknown dtype {dtype}, shape {list(shape)}")
        begin, end = entry["data_offsets"]
        tensors[name] = TensorInfo(shape, dtype, start + begin, start + end)
    return Header(tensors, metadata, start)
