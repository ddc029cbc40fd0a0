"""Open a folder of safetensors files as a source of tensors.

    checkpoint = read_checkpoint(folder)
    checkpoint.tensors["lm_head.weight"].shape
    checkpoint.extents("lm_head.weight")        # a range of a file

Reads headers and the index only, and reports all problems of the folder in one error. `survey`
opens the files that an index names and compares them with it, for safetensors and for torch's
`.bin` files: both name the index after the single file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.documents import MANIFEST, read_json, read_manifest
from tasks.weights.files.header import TensorInfo, read_header
from tasks.weights.files.names import without_wrappers
from tasks.weights.files.source import Extent

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
class Checkpoint:
    """An opened folder of safetensors files: header entries and file names by tensor name.

    Names have no prefixes of wrappers. BLAKE3 hashes are those of files that are unchanged since
    their manifest.
    """

    root: Path
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, str]
    hashes: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(info.nbytes for info in self.tensors.values())

    def extents(self, name: str) -> Sequence[Extent]:
        """Return the tensor's place: one range of one file."""
        info = self.tensors[name]
        return (Extent(self.root / self.files[name], info.start, info.nbytes),)

    def checksum(self, name: str) -> str | None:
        """Return the BLAKE3 hash of the tensor's bytes; None if no manifest states it."""
        return self.hashes.get(name)


def read_checkpoint(root: Path, stem: str = WEIGHTS, *, beside: Collection[str] = ()) -> Checkpoint:
    """Read the headers of a folder with `<stem>.safetensors`, or its index and the files it names.

    Weight files in `beside` are not part of this checkpoint, and no finding.

    Raises:
        ArtifactError: lists every finding: no weights, missing or truncated files, an index that
            disagrees with the files, stray weight files, paths that leave the folder.
    """
    single = f"{stem}.safetensors"
    surveyed = survey(root, single, read_header, beside=beside)
    if surveyed.findings:
        raise ArtifactError(
            f"{root}: not a usable checkpoint: {first_and_more(surveyed.findings)}",
            details=surveyed.findings,
            hint=f"expected {single}, or {index_of(single)} and its files",
        )
    stored = {key: surveyed.opened[file].tensors[key] for key, file in surveyed.files.items()}
    hashes, names = _manifest_hashes(root, surveyed.files), without_wrappers(stored)
    return Checkpoint(
        root,
        {key: stored[name] for key, name in names.items()},
        {key: surveyed.files[name] for key, name in names.items()},
        {key: hashes[name] for key, name in names.items() if name in hashes},
    )


def _manifest_hashes(root: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Return the BLAKE3 hash by tensor name, for the files that are unchanged since the manifest.

    A manifest is the last file written into an artifact. A weight file with a later mtime, or with
    another size than in the manifest, gives no hashes. The stage mechanism checks that the bytes
    are those of the manifest: it compares size, mtime, ctime and inode of every input before a
    stage starts.
    """
    document = read_manifest(root)
    if not document:
        return {}
    written = (root / MANIFEST).stat().st_mtime_ns
    sizes = {name: entry["size"] for name, entry in document["files"].items()}
    hashes: dict[str, str] = {}
    for file in set(files.values()) & set(sizes):
        stat = (root / file).stat()
        if stat.st_size == sizes[file] and stat.st_mtime_ns <= written:
            entries = document["tensors"].get(file, {})
            # A manifest of an earlier version has sha256 instead: those tensors are read.
            hashes |= {
                name: str(entry["blake3"])
                for name, entry in entries.items()
                if files.get(name) == file and "blake3" in entry
            }
    return hashes


class WithTensors(Protocol):
    """An opened file: its tensors by name."""

    @property
    def tensors(self) -> Mapping[str, Any]: ...


T = TypeVar("T", bound=WithTensors)


@dataclass(frozen=True)
class Survey(Generic[T]):
    """Files and tensors of a checkpoint folder."""

    opened: Mapping[str, T]  # the files that could be opened, by name
    files: Mapping[str, str]  # file name by tensor name
    findings: tuple[str, ...]  # everything that is wrong, one line each


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


def survey(
    root: Path, single: str, read: Callable[[Path], T], *, beside: Collection[str] = ()
) -> Survey[T]:
    """Open the files of a checkpoint and compare them with its index, if it has one.

    `single` is the name of the only file if there is no index, for example "model.safetensors";
    weight files in `beside` are not part of this checkpoint, and no finding.
    """
    findings: list[str] = []
    index = _read_index(root / index_of(single), findings)
    names = sorted(set(index.values())) if index is not None else [single]
    opened: dict[str, T] = {}
    for name in names:
        problem = _name_finding(root, name)
        if problem:
            findings.append(problem)
            continue
        try:
            opened[name] = read(root / name)
        except ArtifactError as error:
            findings += [f"{name}: {detail}" for detail in error.details] or [error.message]
    files: dict[str, str] = {}
    for name, opened_file in opened.items():
        for key in opened_file.tensors:
            if key in files:
                findings.append(f"{key}: in {files[key]} and in {name}")
            files[key] = name
    if index is not None:
        findings += _disagreements(index, files, opened)
    findings += _strays(root, {*names, *beside})
    return Survey(opened, files, tuple(findings))


def _read_index(path: Path, findings: list[str]) -> dict[str, str] | None:
    """Return the file name by tensor name; None if there is no index."""
    if not path.is_file():
        return None
    try:
        weight_map = read_json(path, unique=True).get("weight_map")
    except ArtifactError as error:
        findings.append(f"{path.name}: not a readable index: {error.message}")
        return {}
    if not isinstance(weight_map, dict) or not weight_map:
        findings.append(f"{path.name}: not a readable index: no weight_map in it")
        return {}
    odd = [name for name, file in weight_map.items() if not isinstance(file, str)]
    if odd:
        findings.append(f"{path.name}: not a readable index: the file of {odd[0]} is not a string")
        return {}
    return weight_map


def is_plain_name(name: str) -> bool:
    """Return True if `name` can be a file directly in a folder: a valid name without a path."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:  # JSON can hold unpaired surrogates
        return False
    return Path(name).name == name != ".." and 0 < size <= _MAX_NAME and "\0" not in name


def _name_finding(root: Path, name: str) -> str:
    """Return the reason why the file of that name cannot be opened; "" if it can."""
    if not is_plain_name(name):
        return f"index names {name[:_MAX_NAME]!r}, which is not a plain file name"
    return "" if (root / name).is_file() else f"{name}: absent"


def _disagreements(
    index: Mapping[str, str], files: Mapping[str, str], opened: Mapping[str, WithTensors]
) -> Iterator[str]:
    for name, file in index.items():
        if file in opened and name not in opened[file].tensors:
            yield f"{name}: index says {file}, which does not hold it"
    for name, file in files.items():
        if name not in index:
            yield f"{name}: in {file}, but not in the index"


def _strays(root: Path, known: set[str]) -> list[str]:
    names = {path.name for path in weight_files(root, *OTHER_WEIGHTS)}
    return [f"{name}: stray weight file" for name in sorted(names - known)]
