"""Open a folder of weight files as a source of tensors.

    checkpoint = read_checkpoint(folder)
    checkpoint.tensors["lm_head.weight"].shape
    checkpoint.extents("lm_head.weight")        # a range of a file

Reads headers and the index only, and reports all problems of the folder in one error. safetensors
and torch's `.bin` files both name the index after the single file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.core.errors import ArtifactError, first_and_more
from tasks.weights.files.documents import MANIFEST, read_json, read_manifest
from tasks.weights.files.header import read_header
from tasks.weights.files.names import without_wrappers
from tasks.weights.files.source import Extent, FullTensor, FullTensors

WEIGHTS = "model"
ADAPTER = "adapter_model"
OTHER_WEIGHTS = (
    "*.safetensors", "pytorch_model.bin", "pytorch_model-*.bin", "adapter_model.bin",
    "consolidated*.pt*",
)  # fmt: skip
"""File names that a loader that picks weights by glob would take for part of the model."""
_MAX_NAME = 255
"""Longest file name of common file systems, in bytes."""
Tensors = Mapping[str, FullTensor]


@dataclass(frozen=True)
class Checkpoint(FullTensors):
    """An opened folder of safetensors files; keys have no prefixes of wrappers."""

    root: Path

    @property
    def files(self) -> dict[str, str]:
        """File name by key."""
        return {key: tensor.extents[0].path.name for key, tensor in self.tensors.items()}

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def read_checkpoint(root: Path, stem: str = WEIGHTS, *, beside: Collection[str] = ()) -> Checkpoint:
    """Read the headers of a folder with `<stem>.safetensors`, or its index and the files it names.

    Weight files in `beside` are not part of this checkpoint, and no finding. Raises ArtifactError
    with all findings, also about stray weight files.
    """
    single = f"{stem}.safetensors"
    hint = f"expected {single}, or {index_of(single)} and its files"
    hashes = _manifest_hashes(root)

    def read(path: Path) -> Tensors:
        known = hashes.get(path.name, {})
        return {key: replace(t, hash=known.get(key)) for key, t in _read_file(path).items()}

    return Checkpoint(read_files(root, single, read, hint, beside=beside), root)


def read_single(path: Path) -> Checkpoint:
    """Read the header of one safetensors file. Raises ArtifactError."""
    return Checkpoint(_read_file(path), path.parent)


def _read_file(path: Path) -> Tensors:
    return {
        key: FullTensor(info.shape, info.dtype, (Extent(path, info.start, info.nbytes),))
        for key, info in read_header(path).tensors.items()
    }


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
    tensors, findings = survey(root, single, read, beside=beside)
    if findings:
        raise ArtifactError(
            f"{root}: not a usable checkpoint: {first_and_more(findings)}",
            details=findings,
            hint=hint,
        )
    return {key: tensors[name] for key, name in without_wrappers(tensors).items()}


def survey(
    root: Path, single: str, read: Callable[[Path], Tensors], *, beside: Collection[str] = ()
) -> tuple[Tensors, list[str]]:
    """Return the tensors of a checkpoint's files, and a line for everything that is wrong."""
    findings: list[str] = []
    index = _read_index(root / index_of(single), findings)
    names = sorted(set(index.values())) if index is not None else [single]
    files: dict[str, Tensors] = {}
    for name in names:
        if not is_plain_name(name):
            findings.append(f"index names {name[:_MAX_NAME]!r}, which is not a plain file name")
        elif not (root / name).is_file():
            findings.append(f"{name}: absent")
        else:
            try:
                files[name] = read(root / name)
            except ArtifactError as error:
                findings += [f"{name}: {detail}" for detail in error.details] or [error.message]
    tensors: dict[str, FullTensor] = {}
    for name, of_file in files.items():
        findings += [f"{key}: in {name} and in another file" for key in of_file if key in tensors]
        tensors |= of_file
    findings += _disagreements(index, files) if index is not None else ()
    known = {*names, *beside}
    strays = [path.name for path in weight_files(root, *OTHER_WEIGHTS) if path.name not in known]
    findings += [f"{name}: stray weight file" for name in strays]
    return tensors, findings


def _read_index(path: Path, findings: list[str]) -> dict[str, str] | None:
    """Return the file name by tensor name; None if there is no index."""
    if not path.is_file():
        return None
    try:
        table = read_json(path).get("weight_map")
    except ArtifactError as error:
        findings.append(f"{path.name}: not a readable index: {error.message}")
        return {}
    if (
        not isinstance(table, dict)
        or not table
        or not all(isinstance(f, str) for f in table.values())
    ):
        findings.append(f"{path.name}: not a readable index: weight_map is no table of file names")
        return {}
    return table


def is_plain_name(name: str) -> bool:
    """Return True if `name` can be a file directly in a folder: a valid name without a path."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:  # JSON can hold unpaired surrogates
        return False
    return Path(name).name == name != ".." and 0 < size <= _MAX_NAME and "\0" not in name


def _disagreements(index: Mapping[str, str], files: Mapping[str, Tensors]) -> Iterator[str]:
    for key, file in index.items():
        if file in files and key not in files[file]:
            yield f"{key}: index says {file}, which does not hold it"
    for file, tensors in files.items():
        for key in tensors:
            if key not in index:
                yield f"{key}: in {file}, but not in the index"
