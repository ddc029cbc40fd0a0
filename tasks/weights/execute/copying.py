"""Write files and tensors that need no arithmetic: links, kernel copies, casts, known hashes."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.core.disk import write_refused
from tasks.core.errors import ArtifactError
from tasks.core.files import copy_file
from tasks.weights.files import dtypes as bits
from tasks.weights.files.documents import artifact_name
from tasks.weights.files.dtypes import ITEM_BITS, cast, casts, torch_dtype
from tasks.weights.files.source import Reader, Source, part
from tasks.weights.plan import Op

BLOCK = 1 << 20
"""Bytes per block: a multiple of every item size, and small enough to stay in the cache."""


def pages(nbytes: int) -> NDArray[np.uint8]:
    """Allocate zeroed, page-aligned memory; it returns to the system when its last view is freed.

    The heap would keep the gaps that tensors of many sizes leave, and a long run would grow.
    """
    memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(-1, max(1, nbytes)), np.uint8)
    return memory[:nbytes]


class Buffer:
    """Reusable memory that grows to the largest size requested."""

    def __init__(self) -> None:
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    @property
    def size(self) -> int:
        """Number of bytes allocated."""
        return self._memory.size

    def first(self, nbytes: int) -> NDArray[np.uint8]:
        """Return the first `nbytes`; overwrites the bytes returned by the previous call."""
        if self._memory.size < nbytes:
            self._memory = pages(nbytes)
        return self._memory[:nbytes]


class Workspace:
    """Memory of a worker: a buffer to read into, and one for the finished block."""

    def __init__(self) -> None:
        self.read, self.out = Buffer(), Buffer()


def link_or_copy(source: Path, target: Path) -> None:
    """Give `target` the bytes of a file: a hard link within one store of artifacts, else a copy.

    A hard link shares its bytes with the source for good, so the source must be a published
    artifact, and both become read-only. A copy shares them until one side is written, if the file
    system can do that (btrfs, XFS).

    Raises:
        ArtifactError: `target` cannot be written.
    """
    real = source.resolve()  # link to the file itself, not to a symbolic link
    target.unlink(missing_ok=True)
    try:
        if _in_one_store(real, target):
            with contextlib.suppress(OSError):  # a file system without hard links
                os.link(real, target)
                target.chmod(target.stat().st_mode & 0o444)
                return
        copy_file(real, target)
    except OSError as error:
        raise write_refused(target, error) from error


def _in_one_store(source: Path, target: Path) -> bool:
    """Return True if `source` is a published artifact of the store that `target` is made in.

    A store is `<paths.runs>/artifacts`, with a folder `<kind>/<key>` for each artifact.
    """
    folder, store = source.parent, target.resolve().parent.parent.parent
    if store.name != "artifacts" or folder.parent.parent != store:
        return False
    return artifact_name(folder) == (folder.parent.name, folder.name)


def offload(op: Op, sources: Mapping[str, Source], handle: int, at: int) -> str | None:
    """Let the kernel copy a tensor whose hash is known. Returns the hash.

    Args:
        sources: inputs of the plan by name.

    Returns:
        None if the hash is unknown or the kernel cannot copy; then the bytes have to be read.
    """
    known = known_hash(op, sources)
    if op.kind != "copy" or known is None:
        return None
    with opened(op, sources) as reader:
        return known if reader.copy_to(handle, at) else None


def move(
    op: Op, sources: Mapping[str, Source], workspace: Workspace, seen: Seen
) -> Iterator[NDArray[np.uint8]]:
    """Read a tensor that is copied or cast, block by block.

    Args:
        op: an operation of kind "copy" or "cast".
        sources: inputs of the plan by name.

    Yields:
        The next bytes of the output; valid until the next ones are requested.
    """
    casting = op.kind == "cast"
    with opened(op, sources) as reader:
        for at in range(0, reader.nbytes, BLOCK):
            size = min(BLOCK, reader.nbytes - at)
            raw = (workspace.read if casting else workspace.out).first(size)
            reader.into(raw, at)
            seen.read += size
            if casting:
                raw = _cast(raw, op, workspace.out)
            seen.nonfinite += bits.nonfinite(raw, op.dtype)
            seen.all_zero = seen.all_zero and bits.all_zero(raw, op.dtype)
            yield raw


@dataclass
class Seen:
    """Statistics of copied values: bytes read, non-finite elements, True if all are zero."""

    read: int = 0
    nonfinite: int = 0
    all_zero: bool = True


def _cast(raw: NDArray[np.uint8], op: Op, target: Buffer) -> NDArray[np.uint8]:
    source, wanted = op.source_dtype, op.dtype
    if casts(source, wanted):
        count = raw.size * 8 // ITEM_BITS[source]
        return cast(raw, source, wanted, target.first(count * ITEM_BITS[wanted] // 8))
    import torch

    values = torch.from_numpy(raw).view(torch_dtype(source)).to(torch_dtype(wanted))
    cast_bytes: NDArray[np.uint8] = values.view(torch.uint8).numpy()
    return cast_bytes


def known_hash(op: Op, sources: Mapping[str, Source]) -> str | None:
    """Return the source tensor's hash; None if unknown, or if `op` reads only a part of it."""
    source = sources[op.input]
    nbytes = sum(extent.nbytes for extent in source.extents(op.key))
    return source.checksum(op.key) if source_bytes(op) == nbytes else None


def same_as_known(op: Op, sources: Mapping[str, Source], checksum: str) -> str:
    """Return `checksum`, the hash of the copied bytes.

    Raises:
        ArtifactError: the input's manifest has another hash for the tensor.
    """
    if op.kind == "copy" and known_hash(op, sources) not in (None, checksum):
        raise ArtifactError(f"{op.source}: its bytes do not match the hash in its manifest")
    return checksum


def source_bytes(op: Op) -> int:
    """Return the number of bytes that an operation reads of its source tensor."""
    return prod(op.read_shape) * ITEM_BITS[op.source_dtype] // 8


def opened(op: Op, sources: Mapping[str, Source]) -> Reader:
    """Open a reader of the bytes that an operation starts from."""
    first = op.start * ITEM_BITS[op.source_dtype] // 8
    return Reader(part(sources[op.input].extents(op.key), first, source_bytes(op)))
