"""Find the files of a checkpoint and compare them with its index.

    surveyed = survey(folder, "model.safetensors", read_header)
    surveyed.opened["model-00001-of-00002.safetensors"].tensors
    surveyed.files["lm_head.weight"]    the file that holds the tensor
    surveyed.findings                   everything that is wrong with the folder

Works for safetensors and for torch's `.bin` files: both name the index after the single file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tasks.core.errors import ArtifactError
from tasks.weights.files.documents import read_json

OTHER_WEIGHTS = (
    "*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin", "adapter_model.bin",
    "consolidated*.pt*",
)  # fmt: skip
"""File names that a loader that picks weights by glob would take for part of the model."""
_MAX_NAME = 255
"""Longest file name of common file systems, in bytes."""


class WithTensors(Protocol):
    """An opened file: its tensors by name."""

    @property
    def tensors(self) -> Mapping[str, Any]: ...


T = TypeVar("T", bound=WithTensors)


@dataclass(frozen=True)
class Survey(Generic[T]):
    """Files and tensors of a checkpoint folder.

    Attributes:
        opened: the files that could be opened, by name.
        files: file name by tensor name.
        findings: everything that is wrong, one line each.
    """

    opened: Mapping[str, T]
    files: Mapping[str, str]
    findings: tuple[str, ...]


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

    Args:
        root: the folder.
        single: name of the only file if there is no index, for example "model.safetensors".
        read: function that opens one file; raises ArtifactError.
        beside: names of weight files that are not part of this checkpoint; not a finding.
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
