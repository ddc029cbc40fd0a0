"""The tensors of a folder, by headers alone: safetensors, and `.bin` files without unpickling them.

    weights = open_weights(folder, "model.safetensors")
    weights.tensors["lm_head.weight"].shape
    weights.unread["model-00002-of-00003.safetensors"]      why that one tells nothing

Unlike `tasks.weights.files.index.survey`, which refuses what cannot be used, this holds all there
is, broken or not: tensors without elements, keys that come twice, shards that no index names.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from tasks.audit.folder import MAX_VALUES, Folder
from tasks.core.errors import ArtifactError
from tasks.weights.files.header import ITEM_BITS, MAX_HEADER_BYTES, read_header
from tasks.weights.files.index import index_of, is_plain_name
from tasks.weights.pickled.archive import read_archive
from tasks.weights.pickled.state import nested_in
from tasks.weights.pickled.tensors import TensorRef, TorchFile, read_torch_file

MAX_PICKLE_BYTES = 32 << 20
"""What describes the tensors of one `.bin` file: of 100,000 tensors some 20 MB."""
MAX_FILES = 4096
"""Weight files that are opened; the largest models published have a few hundred."""
MAX_TENSORS = 1_000_000
_SHARD = r"-\d+-of-\d+"


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor in a file. `start` is -1 where its elements do not lie in order."""

    file: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    nbytes: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass
class Weights:
    """What one checkpoint of a folder holds.

    Attributes:
        single: the name it would have as one file: "model.safetensors", "adapter_model.bin".
        files: names of the files that were taken for it.
        index: file by tensor name, as its index says; None where it has no usable index.
        tensors: what was found, by tensor name; of a name that comes twice, the first.
        twice: (tensor, file, other file) of those.
        absent: files that the index names and that are not there.
        strange: names in the index that no file in the folder can have.
        unread: by file, why it cannot be read.
        metadata: by file, what its header says beside tensors.
        others: by `.bin` file, names of entries that are no tensors.
        nested: by `.bin` file, the key of a trainer's checkpoint that holds the state dict.
    """

    single: str
    files: tuple[str, ...] = ()
    index: Mapping[str, str] | None = None
    tensors: dict[str, Held] = field(default_factory=dict)
    twice: list[tuple[str, str, str]] = field(default_factory=list)
    absent: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()
    unread: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, Mapping[str, str]] = field(default_factory=dict)
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)
    nested: dict[str, str] = field(default_factory=dict)

    @property
    def is_pickled(self) -> bool:
        """Whether its files are torch's, not safetensors."""
        return not self.single.endswith(".safetensors")

    @property
    def is_whole(self) -> bool:
        """Return True if every file could be read, so that a tensor not found is missing."""
        unknown = self.absent or self.unread or self.strange or self.nested
        return bool(self.files) and not unknown

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(one.nbytes for one in self.tensors.values())


def open_weights(folder: Folder, single: str) -> Weights:
    """Open the files of a checkpoint by its index; without one the single file, or its shards.

    Args:
        folder: where it lies.
        single: the name that it would have as one file.
    """
    found = Weights(single)
    found.index = _index(folder, index_of(single))
    names = sorted(set(found.index.values())) if found.index else _unlisted(folder, single)
    found.strange = tuple(one for one in names if not is_plain_name(one))
    names = [one for one in names if is_plain_name(one)]
    found.absent = tuple(one for one in names if one not in folder.files)
    found.files = tuple(one for one in names if one in folder.files)
    for count, name in enumerate(found.files):
        if count >= MAX_FILES or len(found.tensors) > MAX_TENSORS:
            found.unread[name] = f"not opened: beyond {MAX_FILES} files or {MAX_TENSORS} tensors"
        else:
            read_file(folder, name, found)
    return found


def read_file(folder: Folder, name: str, into: Weights) -> None:
    """Add what one file holds."""
    try:
        if name.endswith(".safetensors"):
            held = _safetensors(folder.root / name, name, into)
        else:
            held = _pickle(folder.root / name, name, into)
    except ArtifactError as error:
        into.unread[name] = error.message.removeprefix(f"{folder.root / name}: ")
        return
    for key, one in held.items():
        if key in into.tensors:
            into.twice.append((key, into.tensors[key].file, name))
        else:
            into.tensors[key] = one


def _index(folder: Folder, name: str) -> Mapping[str, str] | None:
    table = folder.json(name).get("weight_map")
    if name not in folder.files or name in folder.wrong:
        return None
    if not isinstance(table, dict) or not table:
        folder.wrong[name] = "no weight_map in it"
        return None
    if not all(isinstance(file, str) for file in table.values()):
        folder.wrong[name] = "weight_map names something that is no file"
        return None
    return table


def _unlisted(folder: Folder, single: str) -> list[str]:
    """The files of a checkpoint without an index: one of that name, else its shards."""
    if single in folder.files:
        return [single]
    stem, _, suffix = single.rpartition(".")
    pattern = re.compile(re.escape(stem) + _SHARD + re.escape(f".{suffix}"))
    return [name for name in folder.here() if pattern.fullmatch(name)]


def _safetensors(path: Path, name: str, into: Weights) -> dict[str, Held]:
    _require_sane(path)
    header = read_header(path)
    into.metadata[name] = header.metadata
    return {
        key: Held(name, info.shape, info.dtype, info.start, info.nbytes)
        for key, info in header.tensors.items()
    }


def _require_sane(path: Path) -> None:
    """Refuse a header that would take much memory. Raises ArtifactError."""
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if length > MAX_HEADER_BYTES:
                return  # `read_header` says so
            raw = file.read(length)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    if sum(map(raw.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ArtifactError(f"{path}: its header has more than {MAX_VALUES} values")


def _pickle(path: Path, name: str, into: Weights) -> dict[str, Held]:
    record = read_archive(path).records.get("data.pkl")
    if record is not None and record.nbytes > MAX_PICKLE_BYTES:
        raise ArtifactError(
            f"{path}: {record.nbytes} bytes of pickle, at most {MAX_PICKLE_BYTES} are read"
        )
    file = read_torch_file(path)
    content: Any = file.content
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: holds a {type(content).__name__}, no state dict")
    key = nested_in(content)
    if key:
        into.nested[name] = key
        return {}
    into.others[name] = tuple(
        str(key) for key, value in content.items() if not isinstance(value, TensorRef)
    )
    return {
        str(key): _held(file, name, value)
        for key, value in content.items()
        if isinstance(value, TensorRef)
    }


def _held(file: TorchFile, name: str, ref: TensorRef) -> Held:
    nbytes = ref.numel * ITEM_BITS[ref.dtype] // 8
    start = file.extent(ref).start if ref.contiguous else -1
    return Held(name, ref.shape, ref.dtype, start, nbytes)
