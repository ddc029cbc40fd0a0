"""Read the zip file that `torch.save` writes: a table of uncompressed records, checked before use.

torch stores records uncompressed, so each record is a byte range of the file.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tasks.core.errors import ArtifactError
from tasks.weights.pickled.directory import Entry, read_directory

_LOCAL = struct.Struct("<4s5H3L2H")
_SHOWN = 3
_MAX_ARCHIVES = 100_000


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


def read_archive(path: Path) -> Archive:
    """Read and check the table of a file that `torch.save` wrote.

    Raises:
        ArtifactError: not a zip file (cut short, or torch's format before 1.6), compressed or
            encrypted records, or records that overlap or lie outside of the file.
    """
    archives = read_archives(path)
    if len(archives) > 1:
        raise ArtifactError(f"{path}: not written by torch.save: several zip files in one")
    return archives[0]


def read_archives(path: Path) -> list[Archive]:
    """Read the tables of zip files that lie one after the other, as in FSDP's `.distcp` files.

    Raises:
        ArtifactError: as `read_archive`, or other data lies between them.
    """
    archives: list[Archive] = []
    try:
        with path.open("rb") as file:
            end = os.fstat(file.fileno()).st_size
            while end or not archives:
                if len(archives) >= _MAX_ARCHIVES:
                    raise ArtifactError(f"{path}: more than {_MAX_ARCHIVES} zip files in one")
                end, records = _records(path, file, end)
                archives.append(Archive(path, records))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (struct.error, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not a readable zip file: {error}") from error
    return archives


def _records(path: Path, file: BinaryIO, end: int) -> tuple[int, dict[str, Record]]:
    """Return the offset of the zip file that ends at `end`, and its records."""
    base, start, entries = read_directory(path, file, end)
    records: dict[str, Record] = {}
    prefixes = set()
    ends, headers = {base}, {start}
    for entry in entries:
        prefix, _, rest = entry.name.partition("/")
        prefixes.add(prefix)
        if rest in records:
            raise ArtifactError(f"{path}: record {entry.name} appears twice")
        records[rest] = Record(_data_start(path, file, entry), entry.nbytes, entry.crc32)
        headers.add(entry.header)
        ends.add(_end(path, file, records[rest], entry))
    if len(prefixes) != 1:
        some = ", ".join(sorted(prefixes)[:_SHOWN]) or "none"
        raise ArtifactError(f"{path}: not written by torch.save: {len(prefixes)} folders: {some}")
    # No gaps allowed: so an altered length cannot move a record by a few bytes.
    if headers != ends:
        raise ArtifactError(f"{path}: records overlap, or leave gaps between them")
    return base, records


def _data_start(path: Path, file: BinaryIO, entry: Entry) -> int:
    file.seek(entry.header)
    local = _LOCAL.unpack(file.read(_LOCAL.size))
    written = file.read(local[9]).decode()
    if local[0] != b"PK\x03\x04" or written != entry.name or local[3]:
        raise ArtifactError(f"{path}: record {entry.name} is not where the directory says")
    return entry.header + _LOCAL.size + int(local[9]) + int(local[10])


def _end(path: Path, file: BinaryIO, record: Record, entry: Entry) -> int:
    """Return the offset at which the next record has to begin."""
    end = record.start + record.nbytes
    if not entry.described:
        return end
    file.seek(end)
    descriptor = file.read(24)
    if descriptor[:4] != b"PK\x07\x08":
        raise ArtifactError(f"{path}: record {entry.name} does not end where the directory says")
    # Signature, checksum and two sizes: of 4 bytes each, or of 8 if they need it.
    wide = descriptor[8:24] == struct.pack("<2Q", record.nbytes, record.nbytes)
    return end + (24 if wide else 16)
