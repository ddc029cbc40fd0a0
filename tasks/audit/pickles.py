"""Find what loading a file would run: the names in every pickle in it, wherever it lies.

A file is judged by its content, not by its name. Every pickle counts: those one after the other
(torch's format before 1.6), in torch's zip files, in compressed bytes, within byte strings, behind
numpy's header. Nothing is unpickled. What cannot be followed, and every other archive, is reported,
so that "no names" means that there are none.
"""

from __future__ import annotations

import bz2
import lzma
import mmap
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from tasks.core.errors import ArtifactError
from tasks.weights.pickled.torch_file import LOCAL_MAGIC, is_zip, read_archives
from tasks.weights.pickled.unpickler import (
    PickleError,
    TruncatedError,
    UnresolvedError,
    Walker,
)

MAX_BYTES = 128 << 20
"""Most bytes of a pickle, and of all decompressed data of one `Scanner`."""
MAX_STEPS = 40_000_000
"""Most instructions of one `Scanner`: about a minute."""
_HEAD = 64 << 10
_DATA_STEPS = 20_000
"""Most instructions at the beginning of data that no loader unpickles."""
_FEW_STEPS = 64
"""Instructions by which a pickle is told from other data once `MAX_STEPS` are used up."""
_STORAGE = 1024
"""Bytes of a tensor's storage that are scanned."""
_MAX_DEPTH, _MAX_REASONS, _MAX_STREAMS = 4, 5, 100
_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".dill")
_LEGACY_MAGIC, _LEGACY_PICKLES = 0x1950A86A20F9469CFC6C, 5
_ARCHIVES = {
    "7z": (0, b"7z\xbc\xaf\x27\x1c"), "rar": (0, b"Rar!\x1a\x07"), "zip": (0, LOCAL_MAGIC),
    "lz4": (0, b"\x04\x22\x4d\x18"), "zstd": (0, b"\x28\xb5\x2f\xfd"), "tar": (257, b"ustar"),
}  # fmt: skip
"""Archives that are not looked into: place and bytes of their mark."""
_SURE: tuple[tuple[re.Pattern[bytes], Callable[[], Any]], ...] = (
    (re.compile(rb"\x1f\x8b\x08"), lambda: zlib.decompressobj(wbits=31)),
    (re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"), bz2.BZ2Decompressor),
    (re.compile(rb"\xfd7zXZ\0"), lambda: lzma.LZMADecompressor(memlimit=MAX_BYTES)),
)
"""First bytes of compressed data, and what decompresses it."""
_STREAMS = (
    *_SURE,
    (re.compile(rb"\]\0\0"), lambda: lzma.LZMADecompressor(memlimit=MAX_BYTES)),
    (re.compile(rb"x"), zlib.decompressobj),
)
"""The same, with those that texts may begin with."""
_NUMPY, _HDF5 = b"\x93NUMPY", b"\x89HDF\r\n\x1a\n"
_GRAPH_CODE = {
    "keras.layers.Lambda": re.compile(rb'"class_name"\s*:\s*"(?:Lambda"|[^"]{0,99}\\u)'),
    "tensorflow.io.read_file or write_file": re.compile(rb"\x12(?:\x08Read|\x09Write)File"),
}


def _allowed() -> dict[str, frozenset[str]]:
    """Read the names that a pickle of tensors or of a trainer may use, by their section."""
    sections: dict[str, list[str]] = {}
    for line in Path(__file__).with_name("allowed_names.txt").read_text().splitlines():
        if line.startswith("# "):
            names = sections.setdefault(line[2:].partition(":")[0], [])
        elif line:
            names.append(line)
    return {section: frozenset(names) for section, names in sections.items()}


TORCH, _OTHERS, TRAINERS = (_allowed()[name] for name in ("torch", "tensors", "trainers"))
TENSORS = TORCH | _OTHERS
"""Names of tensors' files; `TRAINERS` are classes that load only with weights_only=False."""


@dataclass
class Scanned:
    """Names of what loading a file may import or call, and why it may run more than that."""

    names: set[str] = field(default_factory=set)
    unreadable: list[str] = field(default_factory=list)

    def add_reason(self, where: str, reason: object) -> None:
        """Add a reason, unless there are many."""
        text = f"{where}: {reason}" if where else str(reason)
        if len(self.unreadable) < _MAX_REASONS and text not in self.unreadable:
            self.unreadable.append(text)


@dataclass(frozen=True)
class _Data:
    """Bytes to scan."""

    raw: bytes
    where: str  # name of the part within the file; "" for the file itself
    size: int  # number of bytes with those that were not read
    suspect: bool = False  # it should be a pickle, so that damage counts
    inert: bool = False  # data that no loader of tensors unpickles
    depth: int = 0  # number of byte strings and compressed streams around it


class Scanner:
    """Scan files, with a limit of instructions for all of them together."""

    def __init__(self) -> None:
        self._steps, self._room = MAX_STEPS, MAX_BYTES

    def scan(self, path: Path) -> Scanned:
        """Scan a file. Raises ArtifactError if it cannot be read."""
        scanned = Scanned()
        try:
            with path.open("rb") as file:
                for data in _parts(path, file, scanned):
                    self._content(data, scanned)
                scanned.names.update(_graph_code(path, file))
        except OSError as error:
            raise ArtifactError(f"{path}: cannot be read: {error.strerror or error}") from error
        return scanned

    def _content(self, data: _Data, scanned: Scanned) -> None:
        """Scan bytes as pickles, also compressed or behind numpy's header; report an archive."""
        raw, other = data.raw, data.raw.startswith(_NUMPY) or data.raw[5:9] == b"\0\0\0{"
        if not data.inert:
            other |= self._decompressed(data, scanned)
            for name, (at, magic) in _ARCHIVES.items():
                if raw.startswith(magic, at):
                    scanned.add_reason(data.where, f"{name}, which is not looked into")
                    other = True
        self._pickles(data, 0, scanned, is_other=other)
        if raw.startswith(_NUMPY):
            start = 12 if raw[6:7] > b"\x01" else 10
            size = int.from_bytes(raw[8:start], "little")
            self._pickles(data, start + size, scanned, is_other=True)

    def _decompressed(self, data: _Data, scanned: Scanned) -> bool:
        """Scan the content of compressed data; returns False if it is not compressed."""
        try:
            content = _decompressed(data, max(self._room, _HEAD))
            if content is not None and data.depth == _MAX_DEPTH:
                raise UnresolvedError("compressed too often to be looked into")
        except UnresolvedError as problem:
            scanned.add_reason(data.where, problem)
            return True
        if content is None:
            return False
        self._room -= len(content)
        where = f"{data.where} content".strip()
        inner = replace(data, raw=content, where=where, size=sys.maxsize, depth=data.depth + 1)
        self._content(inner, scanned)
        return True

    def _pickles(self, data: _Data, at: int, scanned: Scanned, *, is_other: bool = False) -> None:
        """Walk the pickles that lie one after the other from `at` on.

        Damage counts unless the bytes have another format; what ran before it always does.
        """
        first, is_legacy, number = at, False, 0
        while at < len(data.raw):
            inert = data.inert or (is_legacy and number >= _LEGACY_PICKLES)
            walker, problem = Walker(data.raw, at), None
            try:
                walker.walk(max(_FEW_STEPS, min(_DATA_STEPS if inert else MAX_STEPS, self._steps)))
            except PickleError as error:
                problem = error
            self._steps -= walker.steps
            begins = data.suspect or data.raw[at : at + 1] == b"\x80"
            is_pickle = walker.steps > 1 or bool(walker.names)  # its first instruction is one
            expected = begins and is_pickle and at == first and not (inert or is_other)
            if expected or walker.calls or (problem is None and begins):
                scanned.names.update(walker.names)
            for blob in walker.blobs if data.depth < _MAX_DEPTH else ():
                where = f"{data.where} bytes".strip()
                nested = _Data(blob, where, len(blob), inert=True, depth=data.depth + 1)
                self._pickles(nested, 0, scanned)
            if problem is not None:
                unknown = isinstance(problem, UnresolvedError) or (
                    isinstance(problem, TruncatedError) and len(data.raw) < problem.end <= data.size
                )
                if expected or (unknown and (walker.names or not inert)):
                    scanned.add_reason(data.where, problem)
                return
            is_legacy |= number == 0 and walker.stack[-1:] == [_LEGACY_MAGIC]
            at, number = walker.at, number + 1


def _parts(path: Path, file: BinaryIO, scanned: Scanned) -> Iterator[_Data]:
    """Yield what a loader may unpickle: the records of torch's zip files, or the file itself."""
    head, size = file.read(_HEAD), path.stat().st_size
    if head.startswith(LOCAL_MAGIC) or is_zip(path):
        try:
            archives = read_archives(path)
        except ArtifactError:
            scanned.add_reason("", "a zip file that torch did not write, which is not looked into")
        else:
            for name, record in (pair for each in archives for pair in each.records.items()):
                inert = name.startswith("data/")
                file.seek(record.start)
                raw = file.read(min(record.nbytes, _STORAGE if inert else MAX_BYTES))
                yield _Data(raw, name, record.nbytes, name.lower().endswith(_SUFFIXES), inert)
            return
    if _may_go_on(head):
        file.seek(0)
        head = file.read(min(size, MAX_BYTES))
    yield _Data(head, "", size, path.name.lower().endswith(_SUFFIXES))


def _may_go_on(head: bytes) -> bool:
    """Return True if more than the first bytes of a file has to be read to judge it."""
    if head.startswith(_NUMPY) or any(magic.match(head) for magic, _ in _STREAMS):
        return True
    try:
        Walker(head).walk(_DATA_STEPS)
    except PickleError as error:
        return isinstance(error, TruncatedError | UnresolvedError)
    return True


def _decompressed(data: _Data, most: int) -> bytes | None:
    """Return the first `most` bytes of the content of compressed data; None for other data.

    Raises UnresolvedError if it cannot be looked into, and is surely compressed.
    """
    content, rest, streams = b"", data.raw, 0
    make = next((make for magic, make in _STREAMS if magic.match(rest)), None)
    try:
        # One stream after the other; each copies the rest.
        while make and rest and len(content) < most and streams < _MAX_STREAMS:
            machine = make()
            content += machine.decompress(rest, most - len(content))
            streams += bool(content) or machine.eof
            rest = machine.unused_data
    except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
        sure = _STREAMS if data.suspect else _SURE
        if "emory" in str(error) or any(magic.match(rest) for magic, _ in sure):
            raise UnresolvedError(f"compressed, and cannot be looked into: {error}") from error
    if rest and streams == _MAX_STREAMS:
        raise UnresolvedError(f"more than {_MAX_STREAMS} compressed streams")
    return content if streams else None


def _graph_code(path: Path, file: BinaryIO) -> Iterator[str]:
    """Yield code in models of Keras (HDF5) and TensorFlow (`.pb`), which hold no pickles."""
    file.seek(0)
    head = file.read(len(_HDF5))
    if head == _HDF5 or (head and path.suffix == ".pb"):
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield from (name for name, code in _GRAPH_CODE.items() if code.search(content))
