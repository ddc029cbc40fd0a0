"""The tensors of a folder, from headers alone: safetensors, and `.bin` files without unpickling.

    weights = open_weights(folder, "model.safetensors")
    weights.tensors["lm_head.weight"].shape
    weights.unread["model-00002-of-00003.safetensors"]      why this file cannot be read

`tasks.weights.files.index.survey` refuses unusable files. This module keeps everything, broken or
not: tensors without elements, duplicate keys, shards that no index names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from tasks.audit.folder import Folder
from tasks.core.errors import ArtifactError
from tasks.weights.files.header import ITEM_BITS, read_header
from tasks.weights.files.index import index_of, is_plain_name
from tasks.weights.pickled.archive import read_archive
from tasks.weights.pickled.state import nested_in
from tasks.weights.pickled.tensors import TensorRef, TorchFile, read_torch_file

MAX_PICKLE_BYTES = 32 << 20
"""Largest pickle in a `.bin` file: 100,000 tensors take about 20 MB."""
_SHARD = r"-\d+-of-\d+"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Header of one tensor. `start` is -1 if the tensor is not contiguous."""

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
    """The weights of one checkpoint in a folder.

    Attributes:
        single: its name as a single file: "model.safetensors", "adapter_model.bin".
        files: names of its files.
        index: file by tensor name, from its index; None without a usable index.
        tensors: headers by tensor name; the first one of a duplicate name.
        twice: (tensor, file, other file) of duplicate names.
        absent: files that the index names and that do not exist.
        strange: names in the index that are not plain file names.
        unread: reason by name for each unreadable file.
        others: names of entries that are not tensors, by `.bin` file.
        nested: key that holds the state dict, by `.bin` file that is a trainer's checkpoint.
    """

    single: str
    files: tuple[str, ...] = ()
    index: Mapping[str, str] | None = None
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    twice: list[tuple[str, str, str]] = field(default_factory=list)
    absent: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()
    unread: dict[str, str] = field(default_factory=dict)
    others: dict[str, tuple[str, ...]] = field(default_factory=dict)
    nested: dict[str, str] = field(default_factory=dict)

    @property
    def is_pickled(self) -> bool:
        """True if its files are torch's, not safetensors."""
        return not self.single.endswith(".safetensors")

    @property
    def is_whole(self) -> bool:
        """True if every file could be read, so that an absent tensor really is missing."""
        unknown = self.absent or self.unread or self.strange or self.nested
        return bool(self.files) and not unknown

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def open_weights(folder: Folder, single: str) -> Weights:
    """Open the files of a checkpoint: those of its index, else `single`, else its shards."""
    weights = Weights(single)
    weights.index = _index(folder, index_of(single))
    names = sorted(set(weights.index.values())) if weights.index else _unlisted(folder, single)
    weights.strange = tuple(name for name in names if not is_plain_name(name))
    names = [name for name in names if is_plain_name(name)]
    weights.absent = tuple(name for name in names if name not in folder.files)
    weights.files = tuple(name for name in names if name in folder.files)
    for name in weights.files:
        _read_file(folder, name, weights)
    return weights


def _read_file(folder: Folder, name: str, into: Weights) -> None:
    """Add the tensors of one file, safetensors or `.bin`, or the reason why it is unreadable."""
    path = folder.root / name
    try:
        safe = name.endswith(".safetensors")
        tensors = _safetensors(path, name) if safe else _pickle(path, name, into)
    except ArtifactError as error:
        into.unread[name] = error.message.removeprefix(f"{path}: ")
        return
    for key, tensor in tensors.items():
        if key in into.tensors:
            into.twice.append((key, into.tensors[key].file, name))
        else:
            into.tensors[key] = tensor


def _index(folder: Folder, name: str) -> Mapping[str, str] | None:
    table = folder.json(name).get("weight_map")
    if name not in folder.files or name in folder.wrong:
        return None
    if not isinstance(table, dict) or not table:
        folder.wrong[name] = "it has no weight_map"
        return None
    if not all(isinstance(file, str) for file in table.values()):
        folder.wrong[name] = "weight_map has a value that is not a file name"
        return None
    return table


def _unlisted(folder: Folder, single: str) -> list[str]:
    """Return the files of a checkpoint without an index: the single file, else its shards."""
    if single in folder.files:
        return [single]
    stem, _, suffix = single.rpartition(".")
    pattern = re.compile(re.escape(stem) + _SHARD + re.escape(f".{suffix}"))
    return [name for name in folder.here() if pattern.fullmatch(name)]


def _safetensors(path: Path, name: str) -> dict[str, StoredTensor]:
    return {
        key: StoredTensor(name, info.shape, info.dtype, info.start, info.nbytes)
        for key, info in read_header(path).tensors.items()
    }


def _pickle(path: Path, name: str, into: Weights) -> dict[str, StoredTensor]:
    record = read_archive(path).records.get("data.pkl")
    if record is not None and record.nbytes > MAX_PICKLE_BYTES:
        raise ArtifactError(
            f"{path}: {record.nbytes} bytes of pickle, at most {MAX_PICKLE_BYTES} are read"
        )
    file = read_torch_file(path)
    content: Any = file.content
    if not isinstance(content, dict):
        raise ArtifactError(f"{path}: contains a {type(content).__name__}, not a state dict")
    key = nested_in(content)
    if key:
        into.nested[name] = key
        return {}
    into.others[name] = tuple(
        str(key) for key, value in content.items() if not isinstance(value, TensorRef)
    )
    return {
        str(key): _info(file, name, value)
        for key, value in content.items()
        if isinstance(value, TensorRef)
    }


def _info(file: TorchFile, name: str, ref: TensorRef) -> StoredTensor:
    nbytes = ref.numel * ITEM_BITS[ref.dtype] // 8
    start = file.extent(ref).start if ref.contiguous else -1
    return StoredTensor(name, ref.shape, ref.dtype, start, nbytes)
