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

_LOCAL = struct.Struct("<4s5H3L2H")
_END = b"PK\x05\x06"
_SHOWN = 3
_MAX_ARCHIVES = 100_000
MAX_DIRECTORY = 64 << 20
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
        """Read one record and verify its checksum.

        Raises:
            ArtifactError: the record is absent, larger than `limit` bytes, cut short, or altered.
        """
        record = self.records.get(name)
        if record is None:
            raise ArtifactError(f"{self.path}: not written by torch.save: no record {name}")
        if record.nbytes > limit:
            raise ArtifactError(f"{self.path}: {name} has {record.nbytes} bytes, allowed: {limit}")
        try:
            with self.path.open("rb") as file:
                file.seek(record.start)
                data = file.read(record.nbytes)
        except OSError as error:
            raise ArtifactError(f"{self.path}: cannot be read: {error.strerror}") from error
        if len(data) < record.nbytes:
            raise ArtifactError(f"{self.path}: truncated: {name} ends after {len(data)} bytes")
        if record.crc32 and zlib.crc32(data) != record.crc32:
            raise ArtifactError(f"{self.path}: {name} does not match its checksum")
        return data


def read_archive(path: Path, start: int = 0, end: int | None = None) -> Archive:
    """Read and check the table of the zip file of `torch.save` between two bytes of a file.

    Raises:
        ArtifactError: not one zip file (cut short, or torch's format before 1.6), compressed or
            encrypted records, or records that overlap or lie outside of the file.
    """
    with _opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if end is None:
            _require_zip(path, file, size)
        elif end > size:
            raise ArtifactError(f"{path}: truncated: a shard ends at byte {end}")
        base, records = _records(path, file, size if end is None else end)
    if base != start:
        raise ArtifactError(f"{path}: a zip file of torch.save begins at byte {base}, not {start}")
    return Archive(path, records)


def read_archives(path: Path) -> list[Archive]:
    """Read the tables of zip files that lie one after the other, as in FSDP's `.distcp` files.

    Raises:
        ArtifactError: as `read_archive`, or other data lies between them.
    """
    archives: list[Archive] = []
    with _opened(path) as file:
        end = os.fstat(file.fileno()).st_size
        _require_zip(path, file, end)
        while end or not archives:
            if len(archives) >= _MAX_ARCHIVES:
                raise ArtifactError(f"{path}: more than {_MAX_ARCHIVES} zip files in one")
            end, records = _records(path, file, end)
            archives.append(Archive(path, records))
    return archives


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (struct.error, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise ArtifactError(f"{path}: not a readable zip file: {error}") from error


def _require_zip(path: Path, file: BinaryIO, size: int) -> None:
    magic = file.read(4)
    if magic[:1] == b"\x80":
        raise ArtifactError(
            f"{path}: a bare pickle: torch's format before 1.6, or another program's", hint=_AGAIN
        )
    if magic != b"PK\x03\x04":
        raise ArtifactError(f"{path}: not written by torch.save: {size} bytes, not a zip file")


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
        if count > MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"a directory of {count} bytes")
        self._file.seek(self._at)
        data = self._file.read(count)
        self._at += len(data)
        return data


def _records(path: Path, file: BinaryIO, end: int) -> tuple[int, dict[str, Record]]:
    """Return the offset of the zip file that ends at `end`, and its records."""
    file.seek(max(0, end - 22))
    tail = file.read(22)
    if tail[:4] != _END or tail[20:] != b"\0\0":
        raise ArtifactError(f"{path}: truncated, or other data follows the zip file's end")
    with zipfile.ZipFile(_Until(file, end)) as opened:
        entries, directory = opened.infolist(), opened.start_dir
    records: dict[str, Record] = {}
    prefixes, headers, ends = set(), {directory}, set()
    for entry in entries:
        prefix, _, rest = entry.filename.partition("/")
        prefixes.add(prefix)
        if rest in records:
            raise ArtifactError(f"{path}: record {entry.filename} appears twice")
        if entry.compress_type or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise ArtifactError(
                f"{path}: record {entry.filename} is compressed or encrypted, which torch never "
                "does",
                hint=_AGAIN,
            )
        start = _data_start(path, file, entry)
        records[rest] = Record(start, entry.file_size, entry.CRC)
        headers.add(entry.header_offset)
        ends.add(_end(path, file, records[rest], entry))
    if len(prefixes) != 1:
        some = ", ".join(sorted(prefixes)[:_SHOWN]) or "none"
        raise ArtifactError(f"{path}: not written by torch.save: {len(prefixes)} folders: {some}")
    base = min(headers)
    # No gaps allowed: so an altered length cannot move a record by a few bytes.
    if headers != ends | {base}:
        raise ArtifactError(f"{path}: records overlap, or leave gaps between them")
    return base, records


def _data_start(path: Path, file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    file.seek(entry.header_offset)
    local = _LOCAL.unpack(file.read(_LOCAL.size))
    written = file.read(local[9]).decode()
    if local[0] != b"PK\x03\x04" or written != entry.orig_filename or local[3]:
        raise ArtifactError(f"{path}: record {entry.filename} is not where the directory says")
    return entry.header_offset + _LOCAL.size + int(local[9]) + int(local[10])


def _end(path: Path, file: BinaryIO, record: Record, entry: zipfile.ZipInfo) -> int:
    """Return the offset at which the next record has to begin."""
    end = record.start + record.nbytes
    if not entry.flag_bits & 8:
        return end
    file.seek(end)
    descriptor = file.read(24)
    if descriptor[:4] != b"PK\x07\x08":
        raise ArtifactError(f"{path}: record {entry.filename} does not end where it should")
    # Signature, checksum and two sizes: of 4 bytes each, or of 8 if they need it.
    wide = descriptor[8:24] == struct.pack("<2Q", record.nbytes, record.nbytes)
    return end + (24 if wide else 16)
