"""Reading a checkpoint folder: which tensor lies where, in which file.

    checkpoint = read_checkpoint(folder)
    checkpoint.tensors["lm_head.weight"].shape
    checkpoint.extents("lm_head.weight")        # a range of a file

Everything that can be wrong with the folder is found from headers and the index, and reported in
one error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError, ConfigError, first_and_more
from tasks.weights.files.documents import read_json as read_json
from tasks.weights.files.header import Header, TensorInfo, read_header
from tasks.weights.files.index import index_of, survey
from tasks.weights.files.source import Extent

WEIGHTS = "model"
ADAPTER = "adapter_model"
MANIFEST = "manifest.json"


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
    """`read_checkpoint` for a `with`."""
    yield read_checkpoint(root, stem, beside=beside)


def read_checkpoint(root: Path, stem: str = WEIGHTS, *, beside: Collection[str] = ()) -> Checkpoint:
    """Read the headers of a folder with `<stem>.safetensors`, or its index and the files it names.

    Args:
        root: the folder.
        stem: what its files' names begin with.
        beside: weight files in it that the caller knows, and reads otherwise.

    Raises:
        ArtifactError: with every finding: nothing there, absent or truncated files, an index that
            disagrees with the files, weight files that belong to nothing, paths out of the folder.
    """
    single = f"{stem}.safetensors"
    found = survey(root, single, read_header, beside=beside)
    if found.findings:
        raise ArtifactError(
            f"{root}: not a usable checkpoint: {first_and_more(found.findings)}",
            details=found.findings,
            hint=f"expected {single}, or {index_of(single)} and its files",
        )
    tensors = {key: found.opened[file].tensors[key] for key, file in found.files.items()}
    return Checkpoint(root, tensors, found.files, found.opened, _manifest_hashes(root, found.files))


_OURS = {"kind", "digest", "tensors", "files", "inputs", "notes"}
"""What every manifest of ours has; see `tasks/pipeline/artifact.py`."""


def _manifest_hashes(root: Path, files: Mapping[str, str]) -> dict[str, str]:
    """sha256 of the tensors of those files that have not been touched since the manifest.

    A manifest is the last file that is written into an artifact. A weight file with a later mtime,
    or of another size than the manifest says, gives no hashes: its tensors are read and hashed.
    That the bytes are still those of the manifest is for the stage mechanism to hold: it compares
    size, mtime, ctime and inode of every input before a stage starts (`artifact.intact`).
    """
    path = root / MANIFEST
    try:
        document = read_json(path)
        if not set(document) >= _OURS:
            return {}  # another tool's file of that name: nobody checks what it says
        written = path.stat().st_mtime_ns
        sizes = {name: int(entry["size"]) for name, entry in document["files"].items()}
        tensors = {name: dict(entries) for name, entries in document["tensors"].items()}
    except (ArtifactError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # not an artifact: a folder that somebody downloaded
    found = {}
    for file in set(files.values()) & set(sizes):
        stat = (root / file).stat()
        if stat.st_size == sizes[file] and stat.st_mtime_ns <= written:
            entries = tensors.get(file, {})
            found.update({n: str(entries[n]["sha256"]) for n in entries if files.get(n) == file})
    return found
