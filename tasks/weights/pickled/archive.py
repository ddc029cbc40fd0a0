"""The zip file that `torch.save` writes: a table of uncompressed records, checked before use.

Layout of a zip file (APPNOTE.TXT 6.3.10, sections 4.3 to 4.5): records, each behind a local header
that repeats its name; the central directory, which lists them; its end record in the last 22 bytes.
torch stores every record as it is, so a record is a range of the file.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tasks.errors import ArtifactError

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_DIRECTORY = 256 << 20
_FULL32 = 0xFFFF_FFFF
_AGAIN = "load it with the torch that wrote it and save it again: torch.save(state, path)"


@dataclass(frozen=True)
class Record:
    """One stored record: where its bytes lie. `crc32` is 0 where the writer left it out."""

    start: int
    nbytes: int
    crc32: int


@dataclass(frozen=True)
class Archive:
    """The table of a file. Record names are without the folder that torch puts before them."""

    path: Path
    records: Mapping[str, Record]

    def read(self, name: str, limit: int) -> bytes:
        """One record's bytes, checked against its checksum.

        Raises:
            ArtifactError: absent, larger than `limit` bytes, cut short, or altered.
        """
        record = self.records.get(name)
        if record is None:
            raise ArtifactError(f"{self.path}: not written by torch.save: no record {name}")
        if record.nbytes > limit:
            raise ArtifactError(f"{self.path}: {name} has {record.nbytes} bytes, allowed: {limit}")
        with self.path.open("rb") as file:
            file.seek(record.start)
            data = file.read(record.nbytes)
        if len(data) < record.nbytes:
            raise ArtifactError(f"{self.path}: truncated: {name} ends after {len(data)} bytes")
        if record.crc32 and zlib.crc32(data) != record.crc32:
            raise ArtifactError(f"{self.path}: {name} does not match its checksum")
        return data


def read_archive(path: Path) -> Archive:
    """Read and check the table of a file that `torch.save` wrote.

    Raises:
        ArtifactError: no zip file (cut short, or torch's format before 1.6), compressed or
            encrypted records, records that overlap or lie outside of the file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            return Archive(path, _records(path, file, size))
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (struct.error, UnicodeDecodeError) as error:
        raise ArtifactError(f"{path}: not a readable zip file: {error}") from error


def _records(path: Path, file: BinaryIO, size: int) -> dict[str, Record]:
    count, start, nbytes = _directory(path, file, size)
    file.seek(start)
    found: dict[str, Record] = {}
    prefixes = set()
    ends, headers = {0}, {start}
    for name, at, record_size, crc, described in _entries(path, file.read(nbytes), count):
        prefix, _, rest = name.partition("/")
        prefixes.add(prefix)
        if rest in found:
            raise ArtifactError(f"{path}: record {name} comes twice")
        record = Record(_data_start(path, file, name, at), record_size, crc)
        found[rest] = record
        headers.add(at)
        ends.add(_end(path, file, record, name, described))
    if len(prefixes) != 1:
        raise ArtifactError(f"{path}: not written by torch.save: records in {sorted(prefixes)}")
    # Gapless: a length that was altered on the way cannot move a record by a few bytes.
    if headers != ends:
        raise ArtifactError(f"{path}: records overlap, or leave gaps between them")
    return found


def _directory(path: Path, file: BinaryIO, size: int) -> tuple[int, int, int]:
    """Number of entries, start and size of the central directory."""
    file.seek(0)
    magic = file.read(4)
    if magic[:1] == b"\x80":
        raise ArtifactError(
            f"{path}: a bare pickle: torch's format before 1.6, or not torch's", hint=_AGAIN
        )
    if magic != b"PK\x03\x04" or size < _END.size:
        raise ArtifactError(f"{path}: not written by torch.save: {size} bytes, no zip file")
    file.seek(size - _END.size)
    end = _END.unpack(file.read(_END.size))
    if end[0] != b"PK\x05\x06" or end[7]:
        raise ArtifactError(f"{path}: truncated, or something follows the zip file's end")
    # torch writes the 64-bit end record always; other tools only when they have to.
    count, nbytes, start, limit = _directory64(path, file, size) or (
        end[4], end[5], end[6], size - _END.size
    )  # fmt: skip
    if nbytes > _MAX_DIRECTORY or start + nbytes != limit or count * _ENTRY.size > nbytes:
        raise ArtifactError(
            f"{path}: {count} entries in bytes {start} to {start + nbytes}, "
            f"directory ends at {limit}"
        )
    return count, start, nbytes


def _directory64(path: Path, file: BinaryIO, size: int) -> tuple[int, int, int, int] | None:
    file.seek(max(0, size - _END.size - _LOCATOR.size))
    magic, _, at, _ = _LOCATOR.unpack(file.read(_LOCATOR.size))
    if magic != b"PK\x06\x07":
        return None
    if at != size - _END.size - _LOCATOR.size - _END64.size:
        raise ArtifactError(f"{path}: the zip file's end is damaged")
    file.seek(at)
    end = _END64.unpack(file.read(_END64.size))
    if end[0] != b"PK\x06\x06":
        raise ArtifactError(f"{path}: no 64-bit directory where it should be")
    return end[7], end[8], end[9], at


def _entries(path: Path, raw: bytes, count: int) -> Iterator[tuple[str, int, int, int, bool]]:
    """Name, offset of the local header, size, checksum, whether a descriptor follows: of each."""
    at = 0
    for _ in range(count):
        (magic, _, _, flags, method, _, _, crc, packed, size, name_size, extra_size, comment, _, _,
         _, offset) = _ENTRY.unpack_from(raw, at)  # fmt: skip
        at += _ENTRY.size
        name = raw[at : at + name_size].decode()
        extra = raw[at + name_size : at + name_size + extra_size]
        at += name_size + extra_size + comment
        if magic != b"PK\x01\x02" or at > len(raw):
            raise ArtifactError(f"{path}: the zip file's directory is damaged")
        if _FULL32 in (packed, size, offset):
            packed, size, offset = _wide(path, extra, [packed, size, offset])
        if method or flags & 1 or packed != size:
            raise ArtifactError(
                f"{path}: record {name} is compressed or encrypted; torch stores as it is",
                hint=_AGAIN,
            )
        yield name, offset, size, crc, bool(flags & 8)
    if at != len(raw):
        raise ArtifactError(f"{path}: the zip file's directory is damaged")


def _wide(path: Path, extra: bytes, values: list[int]) -> tuple[int, int, int]:
    """(packed, size, offset), those that do not fit 32 bits taken from the 64-bit extra field."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{min(length, 24) // 8}Q", extra, at + 4))
            packed, size, offset = values
            # The order within the field is fixed: size, packed size, offset.
            size = next(wide, -1) if size == _FULL32 else size
            packed = next(wide, -1) if packed == _FULL32 else packed
            offset = next(wide, -1) if offset == _FULL32 else offset
            if min(packed, size, offset) >= 0:
                return packed, size, offset
            break
        at += 4 + length
    raise ArtifactError(f"{path}: a record of more than 4 GB has no 64-bit size")


def _data_start(path: Path, file: BinaryIO, name: str, at: int) -> int:
    file.seek(at)
    local = _LOCAL.unpack(file.read(_LOCAL.size))
    written = file.read(local[9]).decode()
    if local[0] != b"PK\x03\x04" or written != name or local[3]:
        raise ArtifactError(f"{path}: record {name} is not where the directory says")
    return at + _LOCAL.size + int(local[9]) + int(local[10])


def _end(path: Path, file: BinaryIO, record: Record, name: str, described: bool) -> int:
    """Where the next record has to begin."""
    end = record.start + record.nbytes
    if not described:
        return end
    file.seek(end)
    descriptor = file.read(24)
    if descriptor[:4] != b"PK\x07\x08":
        raise ArtifactError(f"{path}: record {name} does not end where the directory says")
    # Signature, checksum and two sizes: of 4 bytes each, or of 8 where they need it.
    wide = descriptor[8:24] == struct.pack("<2Q", record.nbytes, record.nbytes)
    return end + (24 if wide else 16)
