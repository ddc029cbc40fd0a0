"""Read files that `torch.save` wrote, with every tensor as a byte range of a file.

read_torch_file(path)      any object
read_state(path)           a state dict, as a `Tensors`
read_model(folder)         pytorch_model.bin, or its index and the files it names
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.dtypes import ITEM_BITS, TORCH_NAMES
from tasks.weights.files.reader import index_of, read_files, weight_files
from tasks.weights.files.tensors import Extent, Tensor, Tensors
from tasks.weights.pickled.archive import Archive, read_archive
from tasks.weights.pickled.unpickler import Foreign, Global, PickleError, run

MODEL = "pytorch_model.bin"
"""File name of a pickled model in transformers; the index of several files is named after it."""
_SHOWN = 50
_AGAIN = "save it as safetensors, with every tensor gathered and contiguous"
MAX_PICKLE_BYTES = 128 << 20
_MAX_AXES, _MAX_SIZE = 64, 1 << 62

DTYPES = TORCH_NAMES | {
    "double": "F64", "float": "F32", "half": "F16", "long": "I64", "int": "I32", "short": "I16",
    "char": "I8", "byte": "U8",
}  # fmt: skip
"""safetensors names by torch's names of dtypes; `FloatStorage` is "float" here."""

_PLAIN = (Global("torch", "Tensor"), Global("torch.nn.parameter", "Parameter"))


class _Storage(NamedTuple):
    """Bytes that tensors are views of; `dtype` is None for an untyped storage."""

    start: int
    nbytes: int
    dtype: str | None


@dataclass(frozen=True)
class TensorRef:
    """Tensor in a file: a view of the storage at byte `storage`; `start`, `stride` in elements."""

    path: Path
    storage: int
    dtype: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """True if the elements are stored one after the other in C order."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return self.numel == 0
            step *= size
        return True

    def extent(self, start: int = 0, numel: int | None = None) -> Extent:
        """Return the byte range of elements `[start, start + numel)`. Raises ArtifactError."""
        numel = self.numel - start if numel is None else numel
        if not self.contiguous:
            raise ArtifactError(
                f"{self.path}: a tensor of shape {list(self.shape)} was saved with strides "
                f"{list(self.stride)}: its elements are not in order",
                hint="save it again as tensor.contiguous()",
            )
        if start < 0 or numel < 0 or start + numel > self.numel:
            raise ArtifactError(
                f"{self.path}: elements {start} to {start + numel} of a tensor of {self.numel}"
            )
        item = ITEM_BITS[self.dtype] // 8
        return Extent(self.path, self.storage + (self.start + start) * item, numel * item)


def read_torch_file(path: Path) -> Any:
    """Read the object in a file of `torch.save`, without torch, tensor data, or running any code.

    It has a `TensorRef` for a tensor and a `Foreign` for an object of an unknown class. Raises
    ArtifactError if the file is damaged or not torch's.
    """
    return read_tensors(read_archive(path))


def read_tensors(archive: Archive) -> Any:
    """Read the object in an archive; see `read_torch_file`."""
    path = archive.path
    data = archive.read("data.pkl", MAX_PICKLE_BYTES)
    if "byteorder" in archive.records and archive.read("byteorder", 64) != b"little":
        raise ArtifactError(f"{path}: written on a big-endian machine")
    try:
        return run(data, persistent=partial(_storage, archive), reduce=partial(_reduce, path))
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
    return _Storage(record.start, nbytes, dtype)


def _reduce(path: Path, target: Global, args: tuple[Any, ...]) -> Any:
    """Return the object of a call, for the few functions that state dicts need."""
    known = target.path
    if known == "collections.OrderedDict" and not args:
        return {}
    if known == "torch.Size" and len(args) == 1:
        return _sizes(args[0])
    # Optional last arguments say that values are negated or conjugated: not plain weights.
    if known == "torch._utils._rebuild_tensor_v2" and len(args) >= 4 and not any(args[6:]):
        return _tensor(path, args, None)
    if known == "torch._utils._rebuild_tensor_v3" and len(args) >= 7 and not any(args[7:]):
        return _tensor(path, args, args[6])
    if known == "torch._tensor._rebuild_from_type_v2" and len(args) == 4:
        # A tensor with Python attributes: DeepSpeed adds some to its flat groups.
        function, kind, inner, _ = args
        if isinstance(function, Global) and isinstance(inner, tuple) and kind in _PLAIN:
            return _reduce(path, function, inner) if function != target else Foreign(known, args)
    if known.startswith("torch._utils._rebuild_parameter") and args:
        return args[0]
    return Foreign(known, args)


def _tensor(path: Path, args: tuple[Any, ...], kind: Any) -> TensorRef | Foreign:
    storage, start, shape, stride = args[0], args[1], _sizes(args[2]), _sizes(args[3])
    dtype = storage.dtype if isinstance(storage, _Storage) else None
    if isinstance(kind, Global):
        dtype = DTYPES.get(kind.name) if kind.module == "torch" else None
    if not isinstance(storage, _Storage) or dtype is None:
        return Foreign("torch.Tensor")
    if not _is_size(start) or len(shape) != len(stride):
        raise PickleError("a tensor without offset, or with strides that do not match its shape")
    ref = TensorRef(path, storage.start, dtype, start, shape, stride)
    last = start + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    if ref.numel and (last + 1) * ITEM_BITS[dtype] // 8 > storage.nbytes:
        raise PickleError(f"a tensor of shape {list(shape)} reaches beyond its storage")
    return ref


def _sizes(value: Any) -> tuple[int, ...]:
    if not is_shape(value):
        raise PickleError("a shape that is not a list of sizes")
    return tuple(value)


def is_shape(value: Any) -> bool:
    """Return True if an unpickled value can be a shape: few axes, each a size."""
    return isinstance(value, tuple | list) and len(value) <= _MAX_AXES and all(map(_is_size, value))


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_SIZE


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
        raise ArtifactError(
            f"{path}: a trainer's checkpoint, its state dict lies under the key {key!r}",
            hint=unnesting(path, key),
        )
    findings: list[str] = []
    tensors: dict[str, Tensor] = {}
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, TensorRef):
            findings.append(f"{name!r}: not a tensor")
        elif value.numel == 0:
            findings.append(f"{name}: has no elements, shape {list(value.shape)}")
        elif not value.contiguous:
            findings.append(f"{name}: strides {list(value.stride)} of shape {list(value.shape)}")
        else:
            tensors[name] = Tensor(value.shape, value.dtype, (value.extent(),))
    if findings or not content:
        findings = findings or ["it is empty"]
        raise ArtifactError(
            f"{path}: not a usable state dict: {first_and_more(findings)}",
            details=findings[:_SHOWN],
            hint=_AGAIN,
        )
    return tensors


def nested_in(content: Mapping[Any, Any]) -> str:
    """Return the key under which a trainer's checkpoint keeps its state dict; "" for a flat one."""
    if any(isinstance(value, TensorRef) for value in content.values()):
        return ""
    for key, value in content.items():
        if isinstance(value, dict) and any(isinstance(v, TensorRef) for v in value.values()):
            return str(key)
    return ""


def unnesting(path: Path, key: str) -> str:
    """Return the command that leaves the state dict alone in the file."""
    load = f"torch.load('{path}', weights_only=True, map_location='cpu')"
    return f"python -c \"import torch; torch.save({load}[{key!r}], '{path}')\""


def is_pickled_model(root: Path) -> bool:
    """Return True if a folder holds a model in `.bin` files and none in safetensors."""
    pickled = any((root / name).is_file() for name in (MODEL, index_of(MODEL)))
    return pickled and not weight_files(root, "model*.safetensors", "model*.safetensors.index.json")


def read_model(root: Path, *, beside: Collection[str] = ()) -> Tensors:
    """Open a model in `pytorch_model.bin`, or in the files that its index names.

    The caller reads the weight files in `beside` itself. Raises ArtifactError with all findings.
    """
    hint = f"expected {MODEL}, or {index_of(MODEL)} and its files; or {_AGAIN}"
    return read_files(root, MODEL, read_state, hint, beside=beside)
