"""Parse the central directory of a zip file: its records and the offsets of their headers.

Layout (APPNOTE.TXT 6.3.10, sections 4.3 to 4.5): the records, each after a local header that
repeats its name; the central directory, which lists them; its end record in the last 22 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tasks.core.errors import ArtifactError

_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_ENTRY = struct.Struct("<4s6H3L5H2L")
MAX_DIRECTORY = 64 << 20
"""Limit in bytes: an entry of torch takes 60 to 80, and there is one per tensor."""
_MAX_NAME = 1024
_FULL32 = 0xFFFF_FFFF
_AGAIN = "load it with the torch that wrote it and save it again: torch.save(state, path)"


@dataclass(frozen=True)
class Entry:
    """Directory entry of a record.

    Attributes:
        name: name of the record, with the folder that torch puts before it.
        header: offset of the local header.
        nbytes: size of the stored bytes.
        crc32: checksum of the stored bytes; 0 if the writer left it out.
        described: True if a data descriptor follows the bytes.
    """

    name: str
    header: int
    nbytes: int
    crc32: int
    described: bool


def read_directory(path: Path, file: BinaryIO, end: int) -> tuple[int, int, list[Entry]]:
    """Read the directory of the zip file that ends at byte `end` of a file.

    Returns:
        Offset of the zip file, offset of its directory, entries.

    Raises:
        ArtifactError: not a zip file, a damaged or oversized directory, compressed or encrypted
            records.
        struct.error, UnicodeDecodeError: a damaged directory.
    """
    base, count, start, nbytes = _directory(path, file, end)
    file.seek(start)
    return base, start, list(_entries(path, file.read(nbytes), count, base))


def _directory(path: Path, file: BinaryIO, size: int) -> tuple[int, int, int, int]:
    """Return offset of the zip file, number of entries, offset and size of the directory."""
    file.seek(0)
    magic = file.read(4)
    if magic[:1] == b"\x80":
        raise ArtifactError(
            f"{path}: a bare pickle: torch's format before 1.6, or another program's", hint=_AGAIN
        )
    if magic != b"PK\x03\x04" or size < _END.size:
        raise ArtifactError(f"{path}: not written by torch.save: {size} bytes, not a zip file")
    file.seek(size - _END.size)
    end = _END.unpack(file.read(_END.size))
    if end[0] != b"PK\x05\x06" or end[7]:
        raise ArtifactError(f"{path}: truncated, or other data follows the zip file's end")
    # torch always writes the 64-bit end record; other tools only for large files.
    count, nbytes, start, limit = _directory64(path, file, size) or (
        end[4], end[5], end[6], size - _END.size
    )  # fmt: skip
    base = limit - nbytes - start
    if nbytes > MAX_DIRECTORY or base < 0 or count * _ENTRY.size > nbytes:
        raise ArtifactError(
            f"{path}: {count} entries in bytes {start} to {start + nbytes}, "
            f"directory ends at {limit}"
        )
    return base, count, base + start, nbytes


def _directory64(path: Path, file: BinaryIO, size: int) -> tuple[int, int, int, int] | None:
    file.seek(max(0, size - _END.size - _LOCATOR.size))
    magic, _, at, _ = _LOCATOR.unpack(file.read(_LOCATOR.size))
    if magic != b"PK\x06\x07":
        return None
    here = size - _END.size - _LOCATOR.size - _END64.size
    file.seek(max(0, here))
    end = _END64.unpack(file.read(_END64.size))
    # Both offsets count from the beginning of the zip file.
    if end[0] != b"PK\x06\x06" or end[9] + end[8] != at:
        raise ArtifactError(f"{path}: no 64-bit directory where it should be")
    return end[7], end[8], end[9], here


def _entries(path: Path, raw: bytes, count: int, base: int) -> Iterator[Entry]:
    at = 0
    for _ in range(count):
        (magic, _, _, flags, method, _, _, crc, packed, size, name_size, extra_size, comment, _, _,
         _, offset) = _ENTRY.unpack_from(raw, at)  # fmt: skip
        at += _ENTRY.size
        if name_size > _MAX_NAME:
            raise ArtifactError(f"{path}: a record's name of {name_size} bytes")
        name = raw[at : at + name_size].decode()
        extra = raw[at + name_size : at + name_size + extra_size]
        at += name_size + extra_size + comment
        if magic != b"PK\x01\x02" or at > len(raw):
            raise ArtifactError(f"{path}: the zip file's directory is damaged")
        if _FULL32 in (packed, size, offset):
            packed, size, offset = _wide(path, extra, [packed, size, offset])
        if method or flags & 1 or packed != size:
            raise ArtifactError(
                f"{path}: record {name} is compressed or encrypted, which torch never does",
                hint=_AGAIN,
            )
        yield Entry(name, base + offset, size, crc, bool(flags & 8))
    if at != len(raw):
        raise ArtifactError(f"{path}: the zip file's directory is damaged")


def _wide(path: Path, extra: bytes, values: list[int]) -> tuple[int, int, int]:
    """Return (packed, size, offset); values above 32 bits come from the 64-bit extra field."""
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
