"""Find what loading a file would run: the names in every pickle in it, wherever it lies.

A file is judged by its content, not by its name. Every pickle counts: those one after the other
(torch's format before 1.6), in torch's zip files, within byte strings, behind numpy's header.
Nothing is unpickled. What cannot be followed, and every other archive, is reported, so that "no
names" means that there are none.
"""

from __future__ import annotations

import io
import lzma
import mmap
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from tasks.core.errors import ArtifactError
from tasks.weights.pickled.archive import LOCAL_MAGIC, is_zip, read_archives
from tasks.weights.pickled.unpickler import (
    DamagedError,
    Foreign,
    Global,
    PickleError,
    TruncatedError,
    UnresolvedError,
    Walker,
)

MAX_BYTES = 128 << 20
"""Most bytes of a pickle."""
MAX_STEPS = 40_000_000
"""Most instructions of one `Scanner`: about a minute."""
_HEAD = 64 << 10
_DATA_STEPS = 20_000
"""Most instructions at the beginning of data that no loader unpickles."""
_FEW_STEPS = 64
"""Instructions by which a pickle is told from other data once `MAX_STEPS` are used up."""
_STORAGE = 1024
"""Bytes of a tensor's storage that are scanned."""
_MAX_DEPTH, _MAX_REASONS = 4, 5
_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".joblib", ".dill")
_LEGACY_MAGIC, _LEGACY_PICKLES = 0x1950A86A20F9469CFC6C, 5
_ARCHIVES = (
    ("7z", 0, b"7z\xbc\xaf\x27\x1c"), ("rar", 0, b"Rar!\x1a\x07"), ("tar", 257, b"ustar"),
    ("zip", 0, LOCAL_MAGIC), ("gzip", 0, b"\x1f\x8b\x08"), ("xz", 0, b"\xfd7zXZ\0"),
    ("bzip2", 4, b"1AY&SY"), ("bzip2", 4, b"\x17rE8P\x90"), ("lz4", 0, b"\x04\x22\x4d\x18"),
    ("zstd", 0, b"\x28\xb5\x2f\xfd"),
)  # fmt: skip
"""Names, and the bytes by which an archive is recognised, at their offset."""
_STREAMS: tuple[tuple[str, bytes, Callable[[], Any]], ...] = (
    ("lzma", b"]\0\0", lambda: lzma.LZMADecompressor(memlimit=MAX_BYTES)),
    ("zlib", b"x", zlib.decompressobj),
)
_NUMPY, _HDF5 = b"\x93NUMPY", b"\x89HDF\r\n\x1a\n"
_GRAPH_CODE = {
    "keras.layers.Lambda": re.compile(rb'"class_name"\s*:\s*"(?:Lambda"|[^"]{0,99}\\u)'),
    "tensorflow.io.read_file or write_file": re.compile(rb"\x12(?:\x08Read|\x09Write)File"),
}


def _allowed() -> dict[str, frozenset[str]]:
    """Read the names that a pickle of tensors or of a trainer may use, by their section."""
    sections: dict[str, set[str]] = {}
    names: set[str] = set()
    for line in Path(__file__).with_name("allowed_names.txt").read_text().splitlines():
        if line.startswith("# "):
            names = sections.setdefault(line[2:].partition(":")[0], set())
        elif line:
            names.add(line)
    return {section: frozenset(names) for section, names in sections.items()}


TORCH = _allowed()["torch"]
TENSORS = TORCH | _allowed()["tensors"]
TRAINERS = _allowed()["trainers"]
"""Classes of settings, which load only with weights_only=False."""


@dataclass
class Scanned:
    """Result of a scan.

    Attributes:
        names: dotted names of the classes and functions that loading the file may import or call.
        unreadable: reasons why the file may run more than that, with the offset.
    """

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
    depth: int = 0  # number of byte strings around it


class Scanner:
    """Scan files, with a limit of instructions for all of them together."""

    def __init__(self) -> None:
        self._steps = MAX_STEPS

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
        """Scan bytes as pickles, also behind numpy's header; report an archive."""
        head = data.raw[:_HEAD]
        archive = "" if data.inert else _archive(head)
        if archive:
            scanned.add_reason(data.where, f"{archive}, which is not looked into")
        is_array, is_safetensors = head.startswith(_NUMPY), head[5:9] == b"\0\0\0{"
        self._pickles(data, 0, scanned, is_other=bool(archive) or is_array or is_safetensors)
        if is_array:
            start = 12 if head[6:7] > b"\x01" else 10
            size = int.from_bytes(head[8:start], "little")
            self._pickles(data, start + size, scanned, is_other=True)

    def _pickles(self, data: _Data, at: int, scanned: Scanned, *, is_other: bool = False) -> None:
        """Walk the pickles that lie one after the other from `at` on.

        Damage counts unless the bytes have another format; what ran before it always does.
        """
        first, is_legacy, number = at, False, 0
        while at < len(data.raw):
            inert = data.inert or (is_legacy and number >= _LEGACY_PICKLES)
            encoded: list[bytes] = []
            walker = Walker(data.raw, at, reduce=partial(_placeholder, encoded))
            problem = None
            try:
                walker.walk(max(_FEW_STEPS, min(_DATA_STEPS if inert else MAX_STEPS, self._steps)))
            except PickleError as error:
                problem = error
            self._steps -= walker.steps
            begins = data.suspect or data.raw[at : at + 1] == b"\x80"
            is_pickle = walker.steps > 1 or bool(walker.names)  # its first instruction is one
            expected = begins and is_pickle and at == first and not (inert or is_other)
            if expected or walker.calls or (problem is None and begins):
                scanned.names.update(name.path for name in walker.names)
            if data.depth < _MAX_DEPTH:
                for blob in (*walker.blobs, *encoded):
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
    size = file.seek(0, io.SEEK_END)
    head = _read(file, 0, _HEAD)
    if head.startswith(LOCAL_MAGIC) or is_zip(file):
        try:
            archives = read_archives(path)
        except ArtifactError:
            scanned.add_reason("", "a zip file that torch did not write, which is not looked into")
        else:
            for archive in archives:
                for name, record in archive.records.items():
                    inert = name.startswith("data/")
                    limit = _STORAGE if inert else MAX_BYTES
                    raw = _read(file, record.start, min(record.nbytes, limit))
                    suspect = name.lower().endswith(_SUFFIXES)
                    yield _Data(raw, name, record.nbytes, suspect, inert)
            return
    raw = _read(file, 0, min(size, MAX_BYTES)) if _may_go_on(head) else head
    yield _Data(raw, "", size, path.name.lower().endswith(_SUFFIXES))


def _archive(head: bytes) -> str:
    """Return the kind of an archive or of packed bytes; "" for anything else."""
    for name, at, magic in _ARCHIVES:
        if head[at : at + len(magic)] == magic and (name != "bzip2" or head.startswith(b"BZh")):
            return name
    for name, magic, make in _STREAMS:
        if head.startswith(magic):
            machine = make()
            try:
                is_stream = bool(machine.decompress(head, _HEAD)) or machine.eof
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
                is_stream = "emory" in str(error)  # it needs more than the limit
            if is_stream:
                return name
    return ""


def _graph_code(path: Path, file: BinaryIO) -> Iterator[str]:
    """Yield code in models of Keras (HDF5) and TensorFlow (`.pb`), which hold no pickles."""
    head = _read(file, 0, len(_HDF5))
    if head == _HDF5 or (head and path.suffix == ".pb"):
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            yield from (name for name, code in _GRAPH_CODE.items() if code.search(content))


def _may_go_on(head: bytes) -> bool:
    """Return True if more than the first bytes of a file has to be read to judge it."""
    if head.startswith(_NUMPY):
        return True
    try:
        Walker(head).walk(_DATA_STEPS)
    except DamagedError as error:
        return isinstance(error, TruncatedError)
    except PickleError:
        return True
    return True


def _read(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


def _placeholder(encoded: list[bytes], target: Global, args: tuple[Any, ...]) -> Foreign:
    """Return a placeholder of a call; collect bytes, which protocol 2 writes as encoded text."""
    if target.path == "_codecs.encode" and args and isinstance(args[0], str):
        encoded.append(args[0].encode("latin-1", "ignore"))
    return Foreign(target.path, args)
