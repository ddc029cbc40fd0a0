"""An untrusted folder: listed once, its files read on demand and within limits.

    folder = Folder(Path("ckpt"))
    folder.files["model.safetensors"]        size in bytes
    folder.json("config.json").get("model_type")
    folder.wrong["config.json"]              why the file is unusable, e.g. not JSON

Nothing is written, and nothing is run in this process. Links to folders, and links that lead out of
the folder and its hub cache, are not followed; pipes and devices are not opened. Every read is
limited in advance: by bytes, and for JSON by the number of values.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import parse_json
from tasks.weights.files.dtypes import ITEM_BITS
from tasks.weights.files.header import read_header
from tasks.weights.files.reader import index_of, is_plain_name
from tasks.weights.files.side_files import entry_problem
from tasks.weights.pickled.archive import read_archive
from tasks.weights.pickled.tensors import TensorRef, nested_in, read_torch_file

MAX_ENTRIES = 50_000
"""Most files and folders that are listed."""
MAX_DEPTH = 6
MAX_JSON_BYTES = 64 << 20
"""The largest published tokenizer.json has about 40 MB."""
MAX_TEXT_BYTES = 4 << 20


@dataclass(frozen=True)
class Listing:
    """The content of a folder, by path relative to it.

    Attributes:
        files: size in bytes of every regular file.
        folders: its subfolders.
        odd: broken links, links to folders, folders nested too deep; with the reason.
        unsafe: links that lead out, pipes, sockets, devices, endless listings; with the reason.
    """

    files: Mapping[str, int]
    folders: tuple[str, ...]
    odd: Mapping[str, str]
    unsafe: Mapping[str, str]


@dataclass
class Folder:
    """An untrusted folder; see the module. A missing file reads as an empty document.

    Attributes:
        root: path of the folder.
        wrong: reason by name for each file that exists and is unusable; filled when files are read.
    """

    root: Path
    wrong: dict[str, str] = field(default_factory=dict)
    _documents: dict[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    _texts: dict[str, str] = field(default_factory=dict, repr=False)
    _listing: Listing | None = field(default=None, repr=False)

    @property
    def listing(self) -> Listing:
        """The content of the folder. Raises ArtifactError if it cannot be listed."""
        if self._listing is None:
            self._listing = list_folder(self.root)
        return self._listing

    @property
    def files(self) -> Mapping[str, int]:
        """Size in bytes of every regular file, by path relative to the folder."""
        return self.listing.files

    def here(self) -> Iterator[str]:
        """Yield the names of files directly in the folder."""
        return (name for name in self.files if "/" not in name)

    def json(self, name: str) -> Mapping[str, Any]:
        """Return a JSON object; empty if the file is missing or unusable (see `wrong`)."""
        if name not in self._documents:
            self._documents[name] = self._object(name)
        return self._documents[name]

    def text(self, name: str) -> str:
        """Return the content of a text file; "" if it is missing or unusable (see `wrong`)."""
        if name not in self._texts:
            raw = self._raw(name, MAX_TEXT_BYTES)
            try:
                self._texts[name] = raw.decode()
            except UnicodeDecodeError as error:
                self._texts[name], self.wrong[name] = "", f"not UTF-8: {error.reason}"
        return self._texts[name]

    def _object(self, name: str) -> Mapping[str, Any]:
        raw = self._raw(name, MAX_JSON_BYTES)
        if name not in self.files or name in self.wrong:
            return {}
        try:
            document = parse_json(raw)
        except ValueError as error:
            self.wrong[name] = f"not JSON: {error}"
            return {}
        if not isinstance(document, dict):
            self.wrong[name] = f"a JSON {type(document).__name__}, not an object"
            return {}
        return document

    def _raw(self, name: str, limit: int) -> bytes:
        size = self.files.get(name)
        if size is None:
            return b""
        if size > limit:
            self.wrong[name] = f"{size} bytes, at most {limit} are read"
            return b""
        try:
            with (self.root / name).open("rb") as file:
                return file.read(limit)
        except OSError as error:
            self.wrong[name] = f"cannot be read: {error.strerror or error}"
            return b""


def by_number(name: str) -> list[tuple[int, str]]:
    """Return a sort key that orders `checkpoint-500` before `checkpoint-1000`."""
    parts = re.split(r"(\d{1,12})", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def list_folder(root: Path) -> Listing:
    """List a folder breadth first, within `MAX_ENTRIES` and `MAX_DEPTH`.

    Raises:
        ArtifactError: the folder does not exist, is not a folder, or cannot be read.
    """
    files: dict[str, int] = {}
    folders: list[str] = []
    odd: dict[str, str] = {}
    unsafe: dict[str, str] = {}
    seen, queue = 0, deque([""])
    while queue and seen <= MAX_ENTRIES:
        at = queue.popleft()
        try:
            with os.scandir(root / at) as entries:
                for entry in entries:
                    seen += 1
                    if seen > MAX_ENTRIES:
                        unsafe[""] = f"more than {MAX_ENTRIES} files; the rest is not listed"
                        break
                    name = f"{at}{entry.name}"
                    kind, size = _kind(entry)
                    if entry.is_symlink() and (problem := _leads_out(root, name)):
                        unsafe[name] = problem
                    elif kind == "file":
                        files[name] = size
                    elif kind == "special":
                        unsafe[name] = "a pipe, a socket or a device"
                    elif kind == "folder" and name.count("/") + 1 < MAX_DEPTH:
                        folders.append(name)
                        queue.append(f"{name}/")
                    else:
                        odd[name] = "nested too deep" if kind == "folder" else kind
        except OSError as error:
            if not at:
                raise ArtifactError(f"{root}: cannot be read: {error.strerror}") from error
            odd[at.rstrip("/")] = f"cannot be read: {error.strerror}"
    return Listing(dict(sorted(files.items())), tuple(sorted(folders)), odd, unsafe)


def _leads_out(root: Path, name: str) -> str:
    """Return the reason why a link must not be followed; "" if it may be, or is broken."""
    return entry_problem(root / name, root) if (root / name).exists() else ""


def _kind(entry: os.DirEntry[str]) -> tuple[str, int]:
    """Return "file", "folder" or "special", else a description; and the size of a file."""
    try:
        info = entry.stat()  # follows links to files, of which hub caches consist
    except OSError as error:
        return f"a broken link: {error.strerror}", 0
    if stat.S_ISREG(info.st_mode):
        return "file", info.st_size
    if not stat.S_ISDIR(info.st_mode):
        return "special", 0
    return ("a link to a folder, which is not followed", 0) if entry.is_symlink() else ("folder", 0)


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
    content = read_torch_file(path)
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
        str(key): _info(name, value)
        for key, value in content.items()
        if isinstance(value, TensorRef)
    }


def _info(name: str, ref: TensorRef) -> StoredTensor:
    nbytes = ref.numel * ITEM_BITS[ref.dtype] // 8
    start = ref.extent().start if ref.contiguous else -1
    return StoredTensor(name, ref.shape, ref.dtype, start, nbytes)
