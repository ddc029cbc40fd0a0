"""Read files that `torch.save` wrote, with every tensor as a byte range of the file.

    read_torch_file(path)      any object; a tensor is a `Tensor`
    read_state(path)           a state dict, as tensors
    read_model(folder)         pytorch_model.bin, or its index and the files it names

The file is a zip of uncompressed records, one per storage, and a pickle that says which tensor is
which part of which storage. The table of the zip is checked before use.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.dtypes import ITEM_BITS, TORCH_NAMES
from tasks.weights.files.reader import index_of, read_files, weight_files
from tasks.weights.files.tensors import Extent, Tensor, Tensors
from tasks.weights.pickled.unpickler import Foreign, Global, PickleError, run

MODEL = "pytorch_model.bin"
"""File name of a pickled model in transformers; the index of several files is named after it."""
DTYPES = TORCH_NAMES | {
    "double": "F64", "float": "F32", "half": "F16", "long": "I64", "int": "I32", "short": "I16",
    "char": "I8", "byte": "U8",
}  # fmt: skip
"""safetensors names by torch's names of dtypes; `FloatStorage` is "float" here."""
LOCAL_MAGIC = b"PK\x03\x04"
_END = b"PK\x05\x06"
_LOCAL = struct.Struct("<4s5H3L2H")
_DESCRIBED, _ENCRYPTED = 8, 1
_WIDE = (1 << 32) - 1
"""Sizes and offsets from here on are written in 8 bytes."""
_MAX_ARCHIVES = 100_000
_MAX_DIRECTORY = 64 << 20
"""Limit in bytes: an entry of torch takes 60 to 80, and there is one per tensor."""
_MAX_PICKLE = 128 << 20
_MAX_AXES, _MAX_SIZE = 64, 1 << 62
_SHOWN = 50
_PLAIN = (Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter"))

# The zip file


@dataclass(frozen=True)
class Archive:
    """Byte ranges of a file's records by name, without the folder that torch puts before names."""

    path: Path
    records: Mapping[str, Extent]
    checksums: Mapping[str, int]  # CRC-32; 0 if the writer left it out

    def read(self, name: str, limit: int) -> bytes:
        """Read a record of at most `limit` bytes and verify its checksum. Raises ArtifactError."""
        record = self.records.get(name)
        if record is None:
            raise ArtifactError(f"{self.path}: not written by torch.save: no record {name}")
        if record.nbytes > limit:
            raise ArtifactError(f"{self.path}: {name} has {record.nbytes} bytes, allowed: {limit}")
        with _opened(self.path) as file:
            file.seek(record.start)
            data = file.read(record.nbytes)
        crc = self.checksums[name]
        if len(data) < record.nbytes or (crc and zlib.crc32(data) != crc):
            raise ArtifactError(f"{self.path}: {name} does not match its checksum")
        return data


def read_archive(path: Path, start: int = 0, end: int | None = None) -> Archive:
    """Read and check the table of the zip file between two bytes of a file.

    Raises ArtifactError for anything else: a file that is cut short, torch's format before 1.6,
    compressed records, or records that overlap.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if end is None:
            _require_zip(path, file)
        elif end > size:
            raise ArtifactError(f"{path}: truncated: a shard ends at byte {end}")
        base, archive = _archive_until(path, file, size if end is None else end)
    if base != start:
        raise ArtifactError(f"{path}: a zip file of torch.save begins at byte {base}, not {start}")
    return archive


def read_archives(path: Path) -> list[Archive]:
    """Read the tables of zip files that lie one after the other, as in FSDP's `.distcp` files."""
    archives: list[Archive] = []
    with _opened(path) as file:
        _require_zip(path, file)
        end = os.fstat(file.fileno()).st_size
        while end and len(archives) < _MAX_ARCHIVES:
            end, archive = _archive_until(path, file, end)
            archives.append(archive)
    if end:
        raise ArtifactError(f"{path}: more than {_MAX_ARCHIVES} zip files in one")
    return archives


def is_zip(file: BinaryIO) -> bool:
    """Return True if a zip file with entries ends at the end of a file, whatever is before it."""
    try:
        with zipfile.ZipFile(_Until(file, file.seek(0, io.SEEK_END))) as opened:
            return bool(opened.infolist())
    except (struct.error, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (struct.error, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ArtifactError(f"{path}: truncated, or not written by torch.save: {error}") from error


def _require_zip(path: Path, file: BinaryIO) -> None:
    magic = file.read(4)
    if magic[:1] == b"\x80":
        raise ArtifactError(
            f"{path}: a bare pickle: torch's format before 1.6, or another program's",
            hint="load it with the torch that wrote it and save it again: torch.save(state, path)",
        )
    if magic != LOCAL_MAGIC:
        raise ValueError("not a zip file")


class _Until(io.RawIOBase):
    """The bytes of a file before an offset, for `zipfile`, which reads from the end."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file, self._end, self._at = file, end, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._end)[whence]
        if self._at < 0:
            raise ValueError("an offset before the file's beginning")
        return self._at

    def read(self, size: int = -1) -> bytes:
        room = max(0, self._end - self._at)
        count = room if size < 0 else min(size, room)
        if count > _MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"a directory of {count} bytes")
        self._file.seek(self._at)
        data = self._file.read(count)
        self._at += len(data)
        return data


def _archive_until(path: Path, file: BinaryIO, end: int) -> tuple[int, Archive]:
    """Return the offset of the zip file that ends at `end`, and its table."""
    tail = _Until(file, end)
    tail.seek(max(0, end - 22))
    last = tail.read(22)
    if last[:4] != _END or last[20:] != b"\0\0":
        raise ValueError("other data follows the zip file's end")
    with zipfile.ZipFile(tail) as opened:
        entries, directory = opened.infolist(), opened.start_dir
    records: dict[str, Extent] = {}
    folders, begins, ends = set(), {directory}, set()
    for entry in entries:
        folder, _, name = entry.filename.partition("/")
        folders.add(folder)
        if name in records:
            raise ValueError(f"record {entry.filename} appears twice")
        packed = entry.compress_type or entry.compress_size != entry.file_size
        if packed or entry.flag_bits & _ENCRYPTED:
            raise ValueError(f"record {entry.filename} is compressed or encrypted")
        records[name] = Extent(path, _data_start(file, entry), entry.file_size)
        begins.add(entry.header_offset)
        ends.add(_end(records[name], entry))
    if len(folders) != 1:
        raise ValueError(f"{len(folders)} folders of records")
    base = min(begins)
    # No gaps allowed: so an altered length cannot move a record by a few bytes.
    if begins != ends | {base}:
        raise ValueError("records overlap, or leave gaps between them")
    return base, Archive(path, records, dict(zip(records, (e.CRC for e in entries), strict=True)))


def _data_start(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    file.seek(entry.header_offset)
    magic, *_, name_size, extra_size = _LOCAL.unpack(file.read(_LOCAL.size))
    if magic != LOCAL_MAGIC or file.read(name_size).decode() != entry.orig_filename:
        raise ValueError(f"record {entry.filename} is not where the directory says")
    return entry.header_offset + _LOCAL.size + int(name_size) + int(extra_size)


def _end(record: Extent, entry: zipfile.ZipInfo) -> int:
    """Return the offset at which the next record has to begin, after checksum and sizes."""
    end = record.start + record.nbytes
    if not entry.flag_bits & _DESCRIBED:
        return end
    return end + (24 if max(record.nbytes, entry.header_offset) >= _WIDE else 16)


# The pickle


class _Storage(NamedTuple):
    """Bytes that tensors are views of; `dtype` is None for an untyped storage."""

    extent: Extent
    dtype: str | None


def read_torch_file(path: Path) -> Any:
    """Read the object in a file of `torch.save`, without torch, tensor data, or running any code.

    It has a `Tensor` for a tensor, without extents if its elements are not in C order, and a
    `Foreign` for an object of an unknown class. Raises ArtifactError if the file is damaged or not
    torch's.
    """
    return read_object(read_archive(path))


def read_object(archive: Archive) -> Any:
    """Read the object in an archive; see `read_torch_file`."""
    path = archive.path
    data = archive.read("data.pkl", _MAX_PICKLE)
    if "byteorder" in archive.records and archive.read("byteorder", 64) != b"little":
        raise ArtifactError(f"{path}: written on a big-endian machine")
    try:
        return run(data, persistent=partial(_storage, archive), reduce=_reduce)
    except PickleError as error:
        raise ArtifactError(f"{path}: not a usable torch file: {error}") from error


def _storage(archive: Archive, identity: Any) -> _Storage | Foreign:
    """Return the storage of `("storage", class, record, device, number of elements)`."""
    if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
        raise PickleError("a persistent id that is not a storage")
    _, kind, key, _, count = identity
    if not (isinstance(kind, Global) and isinstance(key, str) and _is_size(count)):
        raise PickleError("a storage without class, record or size")
    record = archive.records.get(f"data/{key}")
    if record is None:
        raise PickleError(f"storage {key:.100} has no record")
    dtype = None
    if kind.name != "UntypedStorage":
        dtype = DTYPES.get(kind.name.removesuffix("Storage").lower())
        if dtype is None or kind.module != "torch":  # complex or quantised: not weights
            return Foreign(kind.path)
    nbytes = count * (ITEM_BITS[dtype] // 8 if dtype else 1)
    if nbytes != record.nbytes:
        raise PickleError(f"storage {key} needs {nbytes} bytes, its record has {record.nbytes}")
    return _Storage(record, dtype)


def _reduce(target: Global, args: tuple[Any, ...]) -> Any:
    """Return the object of a call, for the few functions that state dicts need."""
    known = target.path
    if known == "collections.OrderedDict" and not args:
        return {}
    if known == "torch.Size" and len(args) == 1:
        return _sizes(args[0])
    # Optional last arguments say that values are negated or conjugated: not plain weights.
    if known == "torch._utils._rebuild_tensor_v2" and len(args) >= 4 and not any(args[6:]):
        return _tensor(args, None)
    if known == "torch._utils._rebuild_tensor_v3" and len(args) >= 7 and not any(args[7:]):
        return _tensor(args, args[6])
    if known == "torch._tensor._rebuild_from_type_v2" and len(args) == 4:
        # A tensor with Python attributes: DeepSpeed adds some to its flat groups.
        function, kind, inner, _ = args
        if isinstance(function, Global) and isinstance(inner, tuple) and kind in _PLAIN:
            return _reduce(function, inner) if function != target else Foreign(known, args)
    if known.startswith("torch._utils._rebuild_parameter") and args:
        return args[0]
    return Foreign(known, args)


def _tensor(args: tuple[Any, ...], kind: Any) -> Tensor | Foreign:
    storage, start, shape, stride = args[0], args[1], _sizes(args[2]), _sizes(args[3])
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    if isinstance(kind, Global):
        dtype = DTYPES.get(kind.name) if kind.module == "torch" else None
    if not isinstance(storage, _Storage) or dtype is None:
        return Foreign("torch.Tensor")
    if not _is_size(start) or len(shape) != len(stride):
        raise PickleError("a tensor without offset, or with strides that do not match its shape")
    item, numel = ITEM_BITS[dtype] // 8, prod(shape)
    last = start + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if numel and (last + 1) * item > storage.extent.nbytes:
        raise PickleError(f"a tensor of shape {list(shape)} reaches beyond its storage")
    if numel and not _in_order(shape, stride):
        return Tensor(shape, dtype)
    at = storage.extent.start + start * item
    return Tensor(shape, dtype, (Extent(storage.extent.path, at, numel * item),))


def _in_order(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return True if the elements are stored one after the other in C order."""
    step = 1
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and own != step:
            return False
        step *= size
    return True


def _sizes(value: Any) -> tuple[int, ...]:
    if not is_shape(value):
        raise PickleError("a shape that is not a list of sizes")
    return tuple(value)


def is_shape(value: Any) -> bool:
    """Return True if an unpickled value can be a shape: few axes, each a size."""
    return isinstance(value, tuple | list) and len(value) <= _MAX_AXES and all(map(_is_size, value))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


# State dicts


def read_state(path: Path) -> Tensors:
    """Open a pickled state dict.

    Raises ArtifactError if it is not a flat dictionary of tensors, or tensors have no elements, as
    ZeRO-3 leaves them if a model is saved without being gathered.
    """
    content = read_torch_file(path)
    if not isinstance(content, dict):
        raise ArtifactError(
            f"{path}: holds a {type(content).__name__}, not a state dict",
            hint="give the file that torch.save(model.state_dict(), path) wrote",
        )
    if key := nested_in(content):
        load = f"torch.load('{path}', weights_only=True, map_location='cpu')"
        raise ArtifactError(
            f"{path}: a trainer's checkpoint, its state dict lies under the key {key!r}",
            hint=f"python -c \"import torch; torch.save({load}[{key!r}], '{path}')\"",
        )
    findings = [] if content else ["it is empty"]
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            findings.append(f"{name!r}: not a tensor")
        elif not value.numel:
            findings.append(f"{name}: has no elements, shape {list(value.shape)}")
        elif not value.extents:
            findings.append(f"{name}: not contiguous, shape {list(value.shape)}")
    if findings:
        raise ArtifactError(
            f"{path}: not a usable state dict: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint="save it as safetensors, with every tensor gathered and contiguous",
        )
    return content


def nested_in(content: Mapping[Any, Any]) -> str:
    """Return the key under which a trainer's checkpoint keeps its state dict; "" for a flat one."""
    if any(isinstance(value, Tensor) for value in content.values()):
        return ""
    for key, value in content.items():
        if isinstance(value, dict) and any(isinstance(v, Tensor) for v in value.values()):
            return str(key)
    return ""


def is_pickled_model(root: Path) -> bool:
    """Return True if a folder holds a model in `.bin` files and none in safetensors."""
    pickled = any((root / name).is_file() for name in (MODEL, index_of(MODEL)))
    return pickled and not weight_files(root, "model*.safetensors", "model*.safetensors.index.json")


def read_model(root: Path, *, beside: Collection[str] = ()) -> Tensors:
    """Open a model in `pytorch_model.bin`, or in the files that its index names.

    The caller reads the weight files in `beside` itself. Raises ArtifactError with all findings.
    """
    hint = f"expected {MODEL}, or {index_of(MODEL)} and its files; or safetensors"
    return read_files(root, MODEL, read_state, hint, beside=beside)
