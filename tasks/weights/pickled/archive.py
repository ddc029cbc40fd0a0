"""Read the zip file that `torch.save` writes: a table of uncompressed records, checked before use.

torch stores records uncompressed, so each record is a byte range of the file.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tasks.core.errors import ArtifactError

LOCAL_MAGIC = b"PK\x03\x04"
_LOCAL = struct.Struct("<4s5H3L2H")
_END = b"PK\x05\x06"
_DESCRIBED, _ENCRYPTED = 8, 1
_WIDE = (1 << 32) - 1
"""Sizes and offsets from here on are written in 8 bytes."""
_MAX_ARCHIVES = 100_000
_MAX_DIRECTORY = 64 << 20
"""Limit in bytes: an entry of torch takes 60 to 80, and there is one per tensor."""
_AGAIN = "load it with the torch that wrote it and save it again: torch.save(state, path)"


@dataclass(frozen=True)
class Record:
    """Byte range of one stored record; `crc32` is 0 if the writer left it out."""

    start: int
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Archive:
    """Records of a file by name, without the folder that torch puts before names."""

    path: Path
    records: Mapping[str, Record]

    def read(self, name: str, limit: int) -> bytes:
        """Read a record of at most `limit` bytes and verify its checksum. Raises ArtifactError."""
        record = self.records.get(name)
        if record is None:
            raise ArtifactError(f"{self.path}: not written by torch.save: no record {name}")
        if record.nbytes > limit:
            raise ArtifactError(f"{self.path}: {name} has {record.nbytes} bytes, allowed: {limit}")
        with _opened(self.path) as file:
            file.seek(record.start)
            data = file.read(record.nbytes)
        if len(data) < record.nbytes or (record.crc32 and zlib.crc32(data) != record.crc32):
            raise ArtifactError(f"{self.path}: {name} does not match its checksum")
        return data


def read_archive(path: Path, start: int = 0, end: int | None = None) -> Archive:
    """Read and check the table of the zip file of `torch.save` between two bytes of a file.

    Raises ArtifactError for anything else: a file that is cut short, torch's format before 1.6,
    compressed records, or records that overlap.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if end is None:
            _require_zip(path, file)
        elif end > size:
            raise ArtifactError(f"{path}: truncated: a shard ends at byte {end}")
        base, archive = _archive_until(path, file, size if end is None else end)
    if base != start:
        raise ArtifactError(f"{path}: a zip file of torch.save begins at byte {base}, not {start}")
    return archive


def read_archives(path: Path) -> list[Archive]:
    """Read the tables of zip files that lie one after the other, as in FSDP's `.distcp` files."""
    archives: list[Archive] = []
    with _opened(path) as file:
        _require_zip(path, file)
        end = os.fstat(file.fileno()).st_size
        while end and len(archives) < _MAX_ARCHIVES:
            end, archive = _archive_until(path, file, end)
            archives.append(archive)
    if end:
        raise ArtifactError(f"{path}: more than {_MAX_ARCHIVES} zip files in one")
    return archives


def is_zip(file: BinaryIO) -> bool:
    """Return True if a zip file with entries ends at the end of a file, whatever is before it."""
    try:
        with zipfile.ZipFile(_Until(file, file.seek(0, io.SEEK_END))) as opened:
            return bool(opened.infolist())
    except (struct.error, ValueError, zipfile.BadZipFile, NotImplementedError):
        return False


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (struct.error, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ArtifactError(f"{path}: truncated, or not written by torch.save: {error}") from error


def _require_zip(path: Path, file: BinaryIO) -> None:
    magic = file.read(4)
    if magic[:1] == b"\x80":
        raise ArtifactError(
            f"{path}: a bare pickle: torch's format before 1.6, or another program's", hint=_AGAIN
        )
    if magic != LOCAL_MAGIC:
        raise ValueError("not a zip file")


class _Until(io.RawIOBase):
    """The bytes of a file before an offset, for `zipfile`, which reads from the end."""

    def __init__(self, file: BinaryIO, end: int) -> None:
        self._file, self._end, self._at = file, end, 0

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._end)[whence]
        if self._at < 0:
            raise ValueError("an offset before the file's beginning")
        return self._at

    def read(self, size: int = -1) -> bytes:
        room = max(0, self._end - self._at)
        count = room if size < 0 else min(size, room)
        if count > _MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"a directory of {count} bytes")
        self._file.seek(self._at)
        data = self._file.read(count)
        self._at += len(data)
        return data


def _archive_until(path: Path, file: BinaryIO, end: int) -> tuple[int, Archive]:
    """Return the offset of the zip file that ends at `end`, and its table."""
    tail = _Until(file, end)
    tail.seek(max(0, end - 22))
    last = tail.read(22)
    if last[:4] != _END or last[20:] != b"\0\0":
        raise ValueError("other data follows the zip file's end")
    with zipfile.ZipFile(tail) as opened:
        entries, directory = opened.infolist(), opened.start_dir
    records: dict[str, Record] = {}
    folders, begins, ends = set(), {directory}, set()
    for entry in entries:
        folder, _, name = entry.filename.partition("/")
        folders.add(folder)
        if name in records:
            raise ValueError(f"record {entry.filename} appears twice")
        packed = entry.compress_type or entry.compress_size != entry.file_size
        if packed or entry.flag_bits & _ENCRYPTED:
            raise ValueError(f"record {entry.filename} is compressed or encrypted")
        records[name] = Record(_data_start(file, entry), entry.file_size, entry.CRC)
        begins.add(entry.header_offset)
        ends.add(_end(records[name], entry))
    if len(folders) != 1:
        raise ValueError(f"{len(folders)} folders of records")
    base = min(begins)
    # No gaps allowed: so an altered length cannot move a record by a few bytes.
    if begins != ends | {base}:
        raise ValueError("records overlap, or leave gaps between them")
    return base, Archive(path, records)


def _data_start(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    file.seek(entry.header_offset)
    magic, *_, name_size, extra_size = _LOCAL.unpack(file.read(_LOCAL.size))
    if magic != LOCAL_MAGIC or file.read(name_size).decode() != entry.orig_filename:
        raise ValueError(f"record {entry.filename} is not where the directory says")
    return entry.header_offset + _LOCAL.size + int(name_size) + int(extra_size)


def _end(record: Record, entry: zipfile.ZipInfo) -> int:
    """Return the offset at which the next record has to begin, after checksum and sizes."""
    if not entry.flag_bits & _DESCRIBED:
        return record.start + record.nbytes
    is_wide = max(record.nbytes, entry.header_offset) >= _WIDE
    return record.start + record.nbytes + (24 if is_wide else 16)
