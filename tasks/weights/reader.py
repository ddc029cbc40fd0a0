"""Reading a checkpoint folder: which tensor lies where, then its bytes, one tensor at a time.

    with open_checkpoint(folder) as checkpoint:
        checkpoint.tensors["lm_head.weight"].shape
        checkpoint.raw("lm_head.weight")        # numpy, the bytes
        checkpoint.torch("lm_head.weight")      # torch, no copy

Everything that can be wrong with the folder is found from headers and the index, and reported in
one error.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tasks.errors import ArtifactError, ConfigError
from tasks.weights.header import Header, TensorInfo, read_header
from tasks.weights.source import Extent

if TYPE_CHECKING:
    import torch

WEIGHTS = "model"
ADAPTER = "adapter_model"
MANIFEST = "manifest.json"

_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "consolidated*.pt*")
"""What a loader that picks weights by glob could take for part of the model."""


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder of safetensors files.

    Attributes:
        root: the folder.
        tensors: header entries by tensor name.
        files: file name by tensor name.
        headers: the header of each file.
        hashes: sha256 by tensor name, as far as a manifest tells that can be trusted.
    """

    root: Path
    tensors: Mapping[str, TensorInfo]
    files: Mapping[str, str]
    headers: Mapping[str, Header]
    hashes: Mapping[str, str] = field(default_factory=dict, repr=False)
    _maps: dict[str, NDArray[np.uint8]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Size of all tensors together."""
        return sum(info.nbytes for info in self.tensors.values())

    def extents(self, name: str) -> Sequence[Extent]:
        """Where the tensor's bytes lie: one range of one file."""
        info = self.tensors[name]
        return (Extent(self.root / self.files[name], info.start, info.nbytes),)

    def sha256(self, name: str) -> str | None:
        """Of the tensor's bytes, where the folder's manifest tells."""
        return self.hashes.get(name)

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes, mapped, 1-D. Valid while the checkpoint is open."""
        info, file = self.tensors[name], self.files[name]
        if file not in self._maps:
            # Private mapping: writable for torch's sake, and never written back.
            self._maps[file] = np.memmap(self.root / file, dtype=np.uint8, mode="c")
        return np.asarray(self._maps[file][info.start : info.end])

    def torch(self, name: str) -> torch.Tensor:
        """The tensor itself, mapped, in its own dtype. Valid while the checkpoint is open."""
        import torch

        info = self.tensors[name]
        flat = torch.from_numpy(self.raw(name)).view(torch_dtype(info.dtype))
        return flat.reshape(info.shape)


def torch_dtype(name: str) -> Any:
    """The torch dtype of a safetensors dtype name. Raises KeyError for one torch lacks."""
    import torch

    return {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
        "U8": torch.uint8, "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    }[name]  # fmt: skip


DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""safetensors names of the dtypes that configuration and config.json speak of."""


def check_dtype(name: str) -> str:
    """`convert.dtype` as it was given. Raises ConfigError for one that is none."""
    if name not in DTYPE_NAMES:
        raise ConfigError(
            f"convert.dtype={name!r} is not one of {', '.join(DTYPE_NAMES)}",
            hint="convert.dtype=bfloat16",
        )
    return name


@contextlib.contextmanager
def open_checkpoint(
    root: Path, stem: str = WEIGHTS, *, beside: Collection[str] = ()
) -> Iterator[Checkpoint]:
    """Open a folder with `<stem>.safetensors` or `<stem>.safetensors.index.json`.

    Args:
        root: the folder.
        stem: what its files' names begin with.
        beside: weight files in it that the caller knows, and reads otherwise.

    Raises:
        ArtifactError: with every finding: nothing there, absent or truncated files, an index that
            disagrees with the files, weight files that belong to nothing, paths out of the folder.
    """
    checkpoint = _survey(root, stem, beside)
    try:
        yield checkpoint
    finally:
        checkpoint._maps.clear()


def _survey(root: Path, stem: str, beside: Collection[str]) -> Checkpoint:
    findings: list[str] = []
    index = _read_index(root, stem, findings)
    names = sorted(set(index.values())) if index is not None else [f"{stem}.safetensors"]
    headers: dict[str, Header] = {}
    for name in names:
        if Path(name).name != name:
            findings.append(f"index names {name!r}, which is not a plain file name")
            continue
        if not (root / name).is_file():
            findings.append(f"{name}: absent")
            continue
        try:
            headers[name] = read_header(root / name)
        except ArtifactError as error:
            findings.append(error.message)
    tensors, files = _locate(headers, findings)
    hashes = _manifest_hashes(root, files)
    if index is not None:
        findings += _index_findings(index, files, headers)
    findings += _stray_findings(root, {*names, *beside})
    if findings:
        raise ArtifactError(
            f"{root}: not a usable checkpoint: {findings[0]}"
            + (f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""),
            details=findings,
            hint=f"expected {stem}.safetensors, or {stem}.safetensors.index.json and its files",
        )
    return Checkpoint(root, tensors, files, headers, hashes)


def _manifest_hashes(root: Path, files: Mapping[str, str]) -> dict[str, str]:
    """sha256 of the tensors of those files that have not been touched since the manifest.

    A manifest is the last file that is written into an artifact. A weight file with a later mtime,
    or of another size than the manifest says, gives no hashes: its tensors are read and hashed.
    That the bytes are still those of the manifest is for the stage mechanism to hold: it compares
    size, mtime, ctime and inode of every input before a stage starts (`artifact.intact`).
    """
    path = root / MANIFEST
    try:
        document = json.loads(path.read_text())
        written = path.stat().st_mtime_ns
        sizes = {name: int(entry["size"]) for name, entry in document["files"].items()}
        tensors = {name: dict(entries) for name, entries in document["tensors"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # not an artifact: a folder that somebody downloaded
    found = {}
    for file in set(files.values()) & set(sizes):
        stat = (root / file).stat()
        if stat.st_size == sizes[file] and stat.st_mtime_ns <= written:
            entries = tensors.get(file, {})
            found.update({n: str(entries[n]["sha256"]) for n in entries if files.get(n) == file})
    return found


def _read_index(root: Path, stem: str, findings: list[str]) -> dict[str, str] | None:
    path = root / f"{stem}.safetensors.index.json"
    if not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        findings.append(f"{path.name}: not a readable index: {error!r}")
        return {}


def _locate(
    headers: Mapping[str, Header], findings: list[str]
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    tensors: dict[str, TensorInfo] = {}
    files: dict[str, str] = {}
    for file, header in headers.items():
        for name, info in header.tensors.items():
            if name in files:
                findings.append(f"{name}: in {files[name]} and in {file}")
            tensors[name], files[name] = info, file
    return tensors, files


def _index_findings(
    index: Mapping[str, str], files: Mapping[str, str], headers: Mapping[str, Header]
) -> list[str]:
    findings = [
        f"{name}: index says {file}, which does not hold it"
        for name, file in index.items()
        if file in headers and name not in headers[file].tensors
    ]
    return findings + [
        f"{name}: in {file}, but not in the index"
        for name, file in files.items()
        if name not in index
    ]


def _stray_findings(root: Path, known: set[str]) -> list[str]:
    found = {path.name for pattern in _OTHER_WEIGHTS for path in root.glob(pattern)}
    return [f"{name}: stray weight file" for name in sorted(found - known)]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ArtifactError when it is not there or not one."""
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArtifactError(f"{path}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ArtifactError(f"{path}: not a JSON object")
    return raw
