"""Writing safetensors as a stream: header first, then every tensor straight to its final offset.

    with CheckpointWriter(out, specs, max_shard_bytes=5 * 10**9) as writer:
        for spec in specs:
            writer.append(spec.name, some_bytes)

The header is known before any tensor is, because shapes are planned; so nothing is buffered, and
no tensor is written twice. Leaving the block with a tensor unwritten is an error, and after an
error no file is left.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

from tasks.errors import ArtifactError, ConfigError
from tasks.weights.header import ITEM_BITS, TensorInfo
from tasks.weights.reader import WEIGHTS

_ALIGN = 8
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True)
class Spec:
    """A tensor that will be written. `dtype` is a safetensors name."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Written:
    """What a writer left: file name and sha256 by tensor name."""

    files: Mapping[str, str]
    sha256: Mapping[str, str]


def parse_size(text: str | int) -> int:
    """`"5GB"` -> 5_000_000_000 bytes. Also MB, KB, GiB, MiB, KiB, and plain numbers.

    Raises:
        ConfigError: for anything else, and for a size of 0.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]I?)?B?\s*", str(text).upper())
    size = int(float(match[1]) * _UNITS[match[2] or ""]) if match else 0
    if size <= 0:
        raise ConfigError(
            f"convert.max_shard_size={text!r} is not a size",
            hint="write it like convert.max_shard_size=5GB (B, KB, MB, GB, KiB, MiB, GiB)",
        )
    return size


def plan_shards(specs: Sequence[Spec], max_bytes: int | None) -> list[list[Spec]]:
    """Split tensors into shards of at most `max_bytes` of tensor data, keeping their order.

    A tensor larger than the limit gets a shard of its own. None means one shard.
    """
    shards: list[list[Spec]] = [[]]
    filled = 0
    for spec in specs:
        if shards[-1] and max_bytes is not None and filled + spec.nbytes > max_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(spec)
        filled += spec.nbytes
    return shards


def shard_names(count: int, stem: str = WEIGHTS) -> list[str]:
    """File names as transformers and vLLM look for them."""
    if count == 1:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def write_index(root: Path, specs: Iterable[Spec], files: Mapping[str, str]) -> None:
    """Write `model.safetensors.index.json`. `total_size` is in bytes of tensor data."""
    document = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
        "weight_map": dict(sorted(files.items())),
    }
    path = root / f"{WEIGHTS}.safetensors.index.json"
    path.write_text(json.dumps(document, indent=2) + "\n")


def require_space(root: Path, nbytes: int) -> None:
    """Refuse to start writing `nbytes` where the disk has less free. Raises ArtifactError."""
    free = shutil.disk_usage(root).free
    if free < nbytes:
        raise ArtifactError(
            f"{root}: {nbytes / 1e9:.2f} GB will be written, {free / 1e9:.2f} GB are free",
            hint="free some space, or put the runs elsewhere: paths.runs=/big/disk/runs",
        )


class _File:
    """One shard being written."""

    def __init__(self, path: Path, specs: Sequence[Spec]) -> None:
        self.path = path
        # Wider types first: with an 8-byte aligned start every tensor is then aligned to itself.
        ordered = sorted(specs, key=lambda spec: -ITEM_BITS[spec.dtype])
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for spec in ordered:
            entries[spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [at, at + spec.nbytes],
            }
            at += spec.nbytes
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGN)
        start = 8 + len(text)
        self.infos = {
            spec.name: TensorInfo(
                spec.shape,
                spec.dtype,
                start + entries[spec.name]["data_offsets"][0],
                start + entries[spec.name]["data_offsets"][1],
            )
            for spec in ordered
        }
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            # Claims the space now: a full disk is found before hours of work, not after.
            os.posix_fallocate(self.handle, 0, start + at)
            self.put(0, memoryview(struct.pack("<Q", len(text)) + text))
        except BaseException:
            os.close(self.handle)
            raise

    def put(self, at: int, data: memoryview) -> None:
        while data:
            done = os.pwrite(self.handle, data, at)
            at, data = at + done, data[done:]


class CheckpointWriter:
    """Writes one checkpoint: a single file, or shards and their index.

    Args:
        root: existing directory.
        specs: every tensor, in the order in which shards are filled.
        max_shard_bytes: upper bound of tensor data a file; None writes a single file.
        stem: "model", or "adapter_model".

    Raises:
        ArtifactError: a name planned twice, a tensor written twice, not at all, or with another
            number of bytes, or the operating system's refusal (full disk).
    """

    def __init__(
        self,
        root: Path,
        specs: Sequence[Spec],
        *,
        max_shard_bytes: int | None = None,
        stem: str = WEIGHTS,
    ) -> None:
        names = [spec.name for spec in specs]
        twice = [name for name, count in Counter(names).items() if count > 1]
        if twice:
            raise ArtifactError(f"{root}: tensors planned twice: {twice[0]}", details=twice)
        self._root, self._specs, self._stem = root, list(specs), stem
        self._shards = plan_shards(specs, max_shard_bytes)
        self._open: dict[str, _File] = {}
        self._files: dict[str, str] = {}
        self._hashes = {name: hashlib.sha256() for name in names}
        self._done = dict.fromkeys(names, 0)

    def __enter__(self) -> CheckpointWriter:
        require_space(self._root, sum(spec.nbytes for spec in self._specs))
        shard_files = shard_names(len(self._shards), self._stem)
        try:
            for name, shard in zip(shard_files, self._shards, strict=True):
                self._open[name] = _File(self._root / name, shard)
                self._files.update({spec.name: name for spec in shard})
        except BaseException as error:
            self._abandon()
            if isinstance(error, OSError):
                raise self._refusal(error) from error
            raise
        return self

    def append(self, name: str, data: Any) -> None:
        """Write the next bytes of one tensor: all of it, or its pieces in order.

        Args:
            name: the tensor.
            data: anything with a buffer (bytes, memoryview, a contiguous numpy array).
        """
        if name not in self._files:
            raise ArtifactError(f"{self._root}: {name} was not planned")
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        file = self._open[self._files[name]]
        info, done = file.infos[name], self._done[name]
        if done + len(view) > info.nbytes:
            raise ArtifactError(
                f"{self._root}: {name} has {info.nbytes} bytes, {done + len(view)} were written"
            )
        try:
            file.put(info.start + done, view)
        except OSError as error:
            raise self._refusal(error) from error
        self._hashes[name].update(view)
        self._done[name] = done + len(view)

    @property
    def written(self) -> Written:
        """Files and hashes. Meaningful after the block was left without an error."""
        return Written(self._files, {name: h.hexdigest() for name, h in self._hashes.items()})

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        short = [
            f"{spec.name}: {self._done[spec.name]} of {spec.nbytes} bytes"
            for spec in self._specs
            if self._done[spec.name] != spec.nbytes
        ]
        if short:
            self._abandon()
            raise ArtifactError(f"{self._root}: not written: {short[0]}", details=short)
        for file in self._open.values():
            os.close(file.handle)
        if len(self._open) > 1:
            write_index(self._root, self._specs, self._files)

    def _abandon(self) -> None:
        for file in self._open.values():
            with contextlib.suppress(OSError):
                os.close(file.handle)
        for name in shard_names(len(self._shards), self._stem):
            (self._root / name).unlink(missing_ok=True)

    def _refusal(self, error: OSError) -> ArtifactError:
        return ArtifactError(
            f"{self._root}: cannot write: {error.strerror or error}",
            hint="free some space, or put the runs elsewhere: paths.runs=/big/disk/runs",
        )
