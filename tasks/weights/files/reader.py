"""Open a folder of safetensors files as a source of tensors.

    checkpoint = read_checkpoint(folder)
    checkpoint.tensors["lm_head.weight"].shape
    checkpoint.extents("lm_head.weight")        # a range of a file

Reads headers and the index only, and reports all problems of the folder in one error.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, ConfigError, first_and_more
from tasks.weights.files.documents import MANIFEST as MANIFEST
from tasks.weights.files.documents import read_json as read_json
from tasks.weights.files.documents import read_manifest
from tasks.weights.files.header import TensorInfo, read_header
from tasks.weights.files.index import index_of, survey
from tasks.weights.files.names import without_wrappers
from tasks.weights.files.source import Extent

WEIGHTS = "model"
ADAPTER = "adapter_model"


@dataclass(frozen=True)
class Checkpoint:
    """An opened folder of safetensors files.

    Attributes:
        root: the folder.
        tensors: header entries by tensor name, without prefixes of wrappers.
        files: file name by tensor name.
        hashes: BLAKE3 hash by tensor name, for files that are unchanged since their manifest.
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


def torch_dtype(name: str) -> Any:
    """Return the torch dtype of a safetensors dtype name. Raises KeyError if torch has none."""
    import torch

    return {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
        "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
        "U8": torch.uint8, "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    }[name]  # fmt: skip


DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""safetensors names of the dtypes that the configuration and config.json use."""


def check_dtype(name: str) -> str:
    """Return `convert.dtype` unchanged. Raises ConfigError if it is not a known dtype."""
    if name not in DTYPE_NAMES:
        raise ConfigError(
            f"convert.dtype={name!r} is not one of {', '.join(DTYPE_NAMES)}",
            hint="convert.dtype=bfloat16",
        )
    return name


def read_checkpoint(root: Path, stem: str = WEIGHTS, *, beside: Collection[str] = ()) -> Checkpoint:
    """Read the headers of a folder with `<stem>.safetensors`, or its index and the files it names.

    Args:
        root: the folder.
        stem: start of the files' names.
        beside: names of weight files that are not part of this checkpoint; not a finding.

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
