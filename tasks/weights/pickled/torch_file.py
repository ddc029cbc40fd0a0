"""Read files that `torch.save` wrote, with every tensor as a byte range of the file.

    read_torch_file(path)      any object; a tensor is a `Tensor`
    read_state(path)           a state dict, as tensors
    read_model(folder)         pytorch_model.bin, or its index and the files it names

The file is a zip of uncompressed records, one per storage, and a pickle that says which tensor is
which part of which storage. The table of the zip is checked before use.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.dtypes import ITEM_BITS, TORCH_NAMES
from tasks.weights.files.reader import index_of, read_files, weight_files
from tasks.weights.files.tensors import Extent, Tensor, Tensors
from tasks.weights.pickled.unpickler import Foreign, Global, PickleError, Walker

MODEL = "pytorch_model.bin"
"""File name of a pickled model in transformers; the index of several files is named after it."""
DTYPES = TORCH_NAMES | {
    "double": "F64", "float": "F32", "half": "F16", "long": "I64", "int": "I32", "short": "I16",
    "char": "I8", "byte": "U8",
}  # fmt: skip
"""safetensors names by torch's names of dtypes; `FloatStorage` is "float" here."""
LOCAL_MAGIC = b"PK\x03\x04"
_END = b"PK\x05\x06"
_DESCRIBED = 8
_WIDE = (1 << 32) - 1
"""Sizes and offsets from here on are written in 8 bytes."""
_MAX_ARCHIVES = 100_000
_MAX_READ = 128 << 20
"""Limit in bytes of the table, of which torch needs 60 to 80 for a tensor, and of the pickle."""
_MAX_AXES, _MAX_SIZE = 64, 1 << 62
_SHOWN = 50
_PICKLE, _ORDER = _SMALL = "data.pkl", "byteorder"
_PLAIN = (Global("torch.Tensor"), Global("torch.nn.parameter.Parameter"))

# The zip file


class Archive(NamedTuple):
    """A zip file of `torch.save`, which may be a part of a file.

    Records have their names without the folder that torch puts before them.
    """

    start: int  # its first byte
    records: dict[str, Extent]
    small: dict[str, bytes]  # the pickle and the byte order, whose checksums are right


class _Until(io.FileIO):
    """The bytes of a file before an offset, for `zipfile`, which reads from the end."""

    def __init__(self, path: Path, end: int) -> None:
        super().__init__(path)
        self._end = end

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at_end = whence == io.SEEK_END
        return super().seek(self._end + offset if at_end else offset, 0 if at_end else whence)

    def read(self, size: int | None = -1) -> bytes:
        room = max(0, self._end - self.tell())
        count = room if size is None or size < 0 else min(size, room)
        if count > _MAX_READ:
            raise zipfile.BadZipFile(f"more than is read: a record or a table of {count} bytes")
        return super().read(count)


def read_archives(path: Path) -> list[Archive]:
    """Read the tables of zip files that lie one after the other, as in FSDP's `.distcp` files.

    Raises ArtifactError for anything else: a file that is cut short, torch's format before 1.6,
    compressed records, or records that overlap.
    """
    archives: list[Archive] = []
    with _refused(path):
        end = _require_zip(path)
        while end and len(archives) < _MAX_ARCHIVES:
            archives.append(_archive_until(path, end))
            end = archives[-1].start
    if end:
        raise ArtifactError(f"{path}: more than {_MAX_ARCHIVES} zip files in one")
    return archives


def is_zip(path: Path) -> bool:
    """Return True if a zip file with entries ends at the end of a file, whatever is before it."""
    try:
        with _Until(path, path.stat().st_size) as file, zipfile.ZipFile(file) as opened:
            return bool(opened.infolist())
    except (OSError, struct.error, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (struct.error, ValueError, EOFError, RuntimeError, zipfile.BadZipFile) as error:
        raise ArtifactError(f"{path}: truncated, or not written by torch.save: {error}") from error


def _require_zip(path: Path) -> int:
    """Return the size of a zip file."""
    with path.open("rb") as file:
        magic, size = file.read(4), file.seek(0, io.SEEK_END)
    if magic[:1] == b"\x80":
        raise ArtifactError(
            f"{path}: a bare pickle: torch's format before 1.6, or another program's",
            hint="load it with the torch that wrote it and save it again: torch.save(state, path)",
        )
    if magic != LOCAL_MAGIC:
        raise ValueError("not a zip file")
    return size


def _archive_until(path: Path, end: int) -> Archive:
    """Read the table of the zip file that ends before byte `end` of a file."""
    records: dict[str, Extent] = {}
    small: dict[str, bytes] = {}
    with _Until(path, end) as file, zipfile.ZipFile(file) as opened:
        file.seek(max(0, end - 22))
        last = file.read(22)
        if last[:4] != _END or last[20:] != b"\0\0":
            raise ValueError("other data follows the zip file's end")
        entries = sorted(opened.infolist(), key=lambda entry: entry.header_offset)
        if len({entry.filename.partition("/")[0] for entry in entries}) != 1:
            raise ValueError("not one folder of records")
        first = entries[0].header_offset
        following = [*(entry.header_offset for entry in entries[1:]), opened.start_dir]
        for entry, limit in zip(entries, following, strict=True):
            if entry.compress_type or entry.compress_size != entry.file_size:
                raise ValueError(f"record {entry.filename} is compressed")
            with opened.open(entry):  # checks the name in the record's own header, and skips that
                start = file.tell()
            name, size = entry.filename.partition("/")[2], entry.file_size
            described = 24 if max(size, entry.header_offset - first) >= _WIDE else 16
            # No gaps allowed: so an altered length cannot move a record by a few bytes.
            if start + size + (described if entry.flag_bits & _DESCRIBED else 0) != limit:
                raise ValueError("records overlap, or leave gaps between them")
            if name in records:
                raise ValueError(f"record {entry.filename} appears twice")
            records[name] = Extent(path, start, size)
            if name in _SMALL:
                small[name] = _checked(opened, entry)
    return Archive(first, records, small)


def _checked(opened: zipfile.ZipFile, entry: zipfile.ZipInfo) -> bytes:
    """Return a record whose checksum is right, or was left out by the writer."""
    checksum: Any = entry.CRC or None
    entry.CRC = checksum
    return opened.read(entry)


# The pickle


class _Storage(NamedTuple):
    """Bytes that tensors are views of; `dtype` is None for an untyped storage."""

    extent: Extent
    dtype: str | None


def read_torch_file(path: Path, start: int = 0, end: int | None = None) -> Any:
    """Read the object in a file of `torch.save`, without torch, tensor data, or running any code.

    It has a `Tensor` for a tensor, without extents if its elements are not in C order, and a
    `Foreign` for an object of an unknown class. `start` and `end` are those of a zip file in a
    larger one. Raises ArtifactError if the file is damaged or not torch's.
    """
    with _refused(path):
        archive = _archive_until(path, _require_zip(path) if end is None else end)
    if archive.start != start:
        raise ArtifactError(f"{path}: its zip file begins at byte {archive.start}, not {start}")
    if _PICKLE not in archive.small:
        raise ArtifactError(f"{path}: not written by torch.save: no record {_PICKLE}")
    if archive.small.get(_ORDER, b"little") != b"little":
        raise ArtifactError(f"{path}: written on a big-endian machine")
    try:
        return _Tensors(archive).value()
    except PickleError as error:
        raise ArtifactError(f"{path}: not a usable torch file: {error}") from error


class _Tensors(Walker):
    """The pickle of an archive, with a `Tensor` for each tensor."""

    def __init__(self, archive: Archive) -> None:
        super().__init__(archive.small[_PICKLE])
        self._records = archive.records

    def persistent_load(self, identity: Any) -> _Storage | Foreign:
        """Return the storage of `("storage", class, record, device, number of elements)`."""
        if not (isinstance(identity, tuple) and len(identity) == 5 and identity[0] == "storage"):
            raise PickleError("a persistent id that is not a storage")
        _, kind, key, _, count = identity
        if not (isinstance(kind, Global) and isinstance(key, str) and _is_size(count)):
            raise PickleError("a storage without class, record or size")
        record = self._records.get(f"data/{key}")
        if record is None:
            raise PickleError(f"storage {key:.100} has no record")
        dtype = None
        if not kind.path.endswith(".UntypedStorage"):
            dtype = DTYPES.get(kind.path.removeprefix("torch.").removesuffix("Storage").lower())
            if dtype is None:  # complex or quantised: not weights
                return Foreign(kind.path)
        nbytes = count * (ITEM_BITS[dtype] // 8 if dtype else 1)
        if nbytes != record.nbytes:
            raise PickleError(f"storage {key} needs {nbytes} bytes, it has {record.nbytes}")
        return _Storage(record, dtype)

    def reduce(self, target: Global, args: tuple[Any, ...]) -> Any:
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
            is_call = isinstance(function, Global) and isinstance(inner, tuple)
            if is_call and function != target and kind in _PLAIN:
                return self.reduce(function, inner)
        if known.startswith("torch._utils._rebuild_parameter") and args:
            return args[0]
        return Foreign(known, args)


def _tensor(args: tuple[Any, ...], kind: Any) -> Tensor | Foreign:
    storage, start, shape, stride = args[0], args[1], _sizes(args[2]), _sizes(args[3])
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    if isinstance(kind, Global):
        dtype = DTYPES.get(kind.path.removeprefix("torch."))
    if not isinstance(storage, _Storage) or dtype is None:
        return Foreign("torch.Tensor")
    if not _is_size(start) or len(shape) != len(stride):
        raise PickleError("a tensor without offset, or with strides that do not match its shape")
    item, numel = ITEM_BITS[dtype] // 8, prod(shape)
    last = start + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if numel and (last + 1) * item > storage.extent.nbytes:
        raise PickleError(f"a tensor of shape {list(shape)} reaches beyond its storage")
    step = 1
    for size, own in zip(reversed(shape), reversed(stride), strict=True):
        if numel and size != 1 and own != step:  # not stored in C order
            return Tensor(shape, dtype)
        step *= size
    at = storage.extent.start + start * item
    return Tensor(shape, dtype, (Extent(storage.extent.path, at, numel * item),))


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
