"""Open a folder of weight files as tensors.

    tensors = read_checkpoint(folder)
    tensors["lm_head.weight"].shape
    tensors["lm_head.weight"].extents        # a range of a file

Reads headers and the index only, and reports all problems of the folder in one error. safetensors
and torch's `.bin` files both name the index after the single file.

A safetensors file has 8 bytes of little-endian header length, a JSON header, then the tensor bytes.
The safetensors library checks it: every tensor has the size that shape and dtype imply, and tensors
fill the file without gap or overlap. It tells no offsets, so the header is parsed here as well.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TypeGuard

from safetensors import SafetensorError, safe_open

from tasks.core.errors import ArtifactError, first_and_more
from tasks.core.files import file_stats, open_regular
from tasks.weights.files.documents import MANIFEST, read_json, read_manifest
from tasks.weights.files.dtypes import ITEM_BITS
from tasks.weights.files.names import without_wrappers
from tasks.weights.files.tensors import Extent, Tensor, Tensors, size_of

WEIGHTS = "model"
ADAPTER = "adapter_model"
OTHER_WEIGHTS = (
    "*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin", "adapter_model.bin",
    "consolidated*.pt*",
)  # fmt: skip
"""File names that a loader that picks weights by glob would take for part of the model."""
_MAX_NAME = 255
"""Longest file name of common file systems, in bytes."""


@dataclass(frozen=True)
class Header:
    """Header of one file: its tensors in file order, `__metadata__`, offset of the first tensor."""

    tensors: Tensors
    metadata: Mapping[str, str]
    data_start: int


def read_header(path: Path) -> Header:
    """Read and check the header of one safetensors file, once. Raises ArtifactError."""
    try:
        stats = file_stats(path)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    return _read_header(path, tuple(stats))


@lru_cache(maxsize=128)  # audit, plan and write ask for the same files
def _read_header(path: Path, _: tuple[int, ...]) -> Header:
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
        tensors[name] = Tensor(shape, dtype, (Extent(path, start + begin, end - begin),))
    return Header(tensors, metadata, start)


def read_checkpoint(root: Path, stem: str = WEIGHTS, *, beside: Collection[str] = ()) -> Tensors:
    """Read the headers of a folder with `<stem>.safetensors`, or its index and the files it names.

    Keys have no prefixes of wrappers. Weight files in `beside` are not part of this checkpoint, and
    no finding. Raises ArtifactError with all findings, also about stray weight files.
    """
    single = f"{stem}.safetensors"
    hint = f"expected {single}, or {index_of(single)} and its files"
    hashes = _manifest_hashes(root)

    def read(path: Path) -> Tensors:
        known = hashes.get(path.name, {})
        tensors = read_header(path).tensors
        return {key: replace(tensor, hash=known.get(key)) for key, tensor in tensors.items()}

    return read_files(root, single, read, hint, beside=beside)


def files_of(tensors: Tensors) -> dict[str, str]:
    """Return the name of the safetensors file by key; tensors of other files are left out."""
    paths = {key: tensor.extents[0].path for key, tensor in tensors.items() if tensor.extents}
    return {key: path.name for key, path in paths.items() if path.suffix == ".safetensors"}


def _manifest_hashes(root: Path) -> dict[str, dict[str, str]]:
    """Return the BLAKE3 hashes by file and tensor, of files that are unchanged since the manifest.

    A manifest is the last file written into an artifact. A weight file with a later mtime, or with
    another size than in the manifest, gives no hashes. The stage mechanism checks that the bytes
    are those of the manifest: it compares size, mtime, ctime and inode of every input before a
    stage starts.
    """
    document = read_manifest(root)
    hashes = {}
    for name, entries in document.get("tensors", {}).items():
        path = root / name
        if not path.is_file() or name not in document["files"]:
            continue
        stat, written = path.stat(), (root / MANIFEST).stat().st_mtime_ns
        if stat.st_size == document["files"][name]["size"] and stat.st_mtime_ns <= written:
            hashes[name] = {key: str(e["blake3"]) for key, e in entries.items()}
    return hashes


def weight_files(folder: Path, *patterns: str) -> list[Path]:
    """Return the files of a folder that match a glob pattern and that loaders see, sorted.

    transformers and vLLM list folders by `glob.glob`, which leaves out names with a leading dot:
    `._x` of macOS, `.nfs*`, locks, caches. `Path.glob` does not.
    """
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in paths if not is_hidden(path.relative_to(folder).as_posix()))


def is_hidden(name: str) -> bool:
    """Return True if a relative path has a part with a leading dot."""
    return any(part.startswith(".") for part in name.split("/"))


def index_of(single: str) -> str:
    """Return the index's name for a checkpoint whose only file would be called `single`."""
    return f"{single}.index.json"


def read_files(
    root: Path,
    single: str,
    read: Callable[[Path], Tensors],
    hint: str,
    *,
    beside: Collection[str] = (),
) -> Tensors:
    """Return the tensors of a checkpoint's files, without prefixes of wrappers.

    `single` is the name of the only file if there is no index, `read` opens a file. Raises
    ArtifactError with all findings of `survey`, and this hint.
    """
    tensors, findings = survey(root, single, read, beside)
    if findings:
        raise ArtifactError(
            f"{root}: not a usable checkpoint: {first_and_more(findings)}",
            details=findings,
            hint=hint,
        )
    return {key: tensors[name] for key, name in without_wrappers(tensors).items()}


def survey(
    root: Path, single: str, read: Callable[[Path], Tensors], beside: Collection[str] = ()
) -> tuple[Tensors, list[str]]:
    """Return the tensors of a checkpoint's files, and a line for everything that is wrong."""
    findings: list[str] = []
    index, weights = root / index_of(single), Weights(single)
    if index.is_file():
        try:
            table = read_json(index).get("weight_map")
            weights.index = table if is_index(table) else {}
            reason = "" if weights.index else "weight_map is no table of file names"
        except ArtifactError as error:
            weights.index, reason = {}, error.message
        findings += [f"{index.name}: not a readable index: {reason}"] if reason else []
    names = [single] if weights.index is None else sorted(set(weights.index.values()))
    weights.open(root, names, read, lambda name: (root / name).is_file())
    findings += weights.findings()
    known = {*names, *beside}
    strays = [path.name for path in weight_files(root, *OTHER_WEIGHTS) if path.name not in known]
    return weights.tensors, findings + [f"{name}: stray weight file" for name in strays]


def is_index(table: object) -> TypeGuard[dict[str, str]]:
    """Return True if an index's `weight_map` is a table of file names."""
    return (
        isinstance(table, dict)
        and bool(table)
        and all(isinstance(file, str) for file in table.values())
    )


@dataclass
class Weights:
    """The weight files of a checkpoint, as far as they can be read."""

    single: str  # its name as a single file: "model.safetensors", "adapter_model.bin"
    files: tuple[str, ...] = ()
    index: Mapping[str, str] | None = None  # file by tensor name; None without a usable index
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the first of a duplicate name
    file_of: dict[str, str] = field(default_factory=dict)
    twice: dict[str, tuple[str, str]] = field(default_factory=dict)  # files by duplicate name
    absent: tuple[str, ...] = ()  # files that the index names and that do not exist
    strange: tuple[str, ...] = ()  # names in the index that are not plain file names
    unread: dict[str, str] = field(default_factory=dict)  # reason by unreadable file
    others: list[str] = field(default_factory=list)  # entries of `.bin` files, not tensors

    @property
    def is_pickled(self) -> bool:
        """True if its files are torch's, not safetensors."""
        return not self.single.endswith(".safetensors")

    @property
    def is_whole(self) -> bool:
        """True if every file could be read, so that an absent tensor really is missing."""
        return bool(self.files) and not (self.absent or self.unread or self.strange)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return size_of(self.tensors)

    def open(
        self,
        root: Path,
        names: Iterable[str],
        read: Callable[[Path], Tensors],
        exists: Callable[[str], bool],
    ) -> None:
        """Read files of a folder by name; what cannot be read is entered."""
        plain = [name for name in names if _is_plain(name)]
        self.strange = tuple(name for name in names if name not in plain)
        self.absent = tuple(name for name in plain if not exists(name))
        self.files = tuple(name for name in plain if name not in self.absent)
        for name in self.files:
            path = root / name
            try:
                tensors = read(path)
            except ArtifactError as error:
                reasons = error.details or [error.message.removeprefix(f"{path}: ")]
                self.unread[name] = "; ".join(reasons)
                continue
            for key, tensor in tensors.items():
                if key in self.tensors:
                    self.twice[key] = self.file_of[key], name
                else:
                    self.tensors[key], self.file_of[key] = tensor, name

    def findings(self) -> Iterator[str]:
        """Yield a line for everything that is wrong."""
        for name in self.strange:
            yield f"index names {name[:_MAX_NAME]!r}, which is not a plain file name"
        for name in self.absent:
            yield f"{name}: absent"
        for name, reason in self.unread.items():
            yield f"{name}: {reason}"
        for key, (first, second) in self.twice.items():
            yield f"{key}: in {second} and in another file, {first}"
        for key, file in (self.index or {}).items():
            is_read = file in self.files and file not in self.unread and key not in self.twice
            if is_read and self.file_of.get(key) != file:
                yield f"{key}: index says {file}, which does not hold it"
        for key, file in self.file_of.items():
            if self.index is not None and key not in self.index:
                yield f"{key}: in {file}, but not in the index"


def _is_plain(name: str) -> bool:
    """Return True if `name` can be a file directly in a folder: a valid name without a path."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:  # JSON can hold unpaired surrogates
        return False
    return Path(name).name == name != ".." and 0 < size <= _MAX_NAME and "\0" not in name
